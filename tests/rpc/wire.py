"""A gRPC client on a bare HTTP/2 connection (RFC 9113), which may be sent exactly what the test grants."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum

DEADLINE_S = 30.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_TABLE_SIZE, INITIAL_WINDOW = 1, 4
ACK = END_STREAM = 0x1
END_HEADERS = 0x4


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8


@dataclass
class Stream:
    """What came of one call: the bytes of its messages, its header blocks as they stood on the wire, and its end."""

    data: bytes = b""
    headers: list[bytes] = field(default_factory=list)
    is_ended: bool = False
    """The server said that nothing follows."""
    is_reset: bool = False

    def ended_with(self, status: int) -> bool:
        """Whether the call is over, with that gRPC status, in trailers that are not compressed."""
        found = b"\x0bgrpc-status" + bytes([len(str(status))]) + str(status).encode()
        return self.is_ended and found in self.headers[-1]


class Wire:
    """One connection. It acknowledges settings and pings, as a client that is alive does, and nothing else."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self._reader, self._writer = reader, writer
        self._next_id = 1
        self._came = asyncio.Event()
        self.streams: dict[int, Stream] = {}
        self.is_closed = False
        # Without a table the server repeats each header in full.
        settings = struct.pack(">HIHI", HEADER_TABLE_SIZE, 0, INITIAL_WINDOW, window)
        writer.write(PREFACE + _frame(Kind.SETTINGS, 0, 0, settings))

    def open(self, method: str) -> int:
        """Begin a call and return its stream's id; no message is sent."""
        number, self._next_id = self._next_id, self._next_id + 2
        self.streams[number] = Stream()
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "wire",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        block = b"".join(_literal(name, value) for name, value in fields.items())
        self._writer.write(_frame(Kind.HEADERS, END_HEADERS, number, block))
        return number

    def send(self, number: int, message: bytes, *, is_last: bool = True) -> None:
        """Send a message, which fits a frame."""
        framed = b"\0" + struct.pack(">I", len(message)) + message
        self._writer.write(_frame(Kind.DATA, END_STREAM if is_last else 0, number, framed))

    def end(self, number: int) -> None:
        """Say that no message follows."""
        self._writer.write(_frame(Kind.DATA, END_STREAM, number))

    def call(self, method: str, message: bytes) -> int:
        """Begin a call with one message and return its stream's id."""
        number = self.open(method)
        self.send(number, message)
        return number

    def grant(self, number: int, num_bytes: int) -> None:
        """Take so many bytes more of a call, or, with 0, of all together."""
        self._writer.write(_frame(Kind.WINDOW_UPDATE, 0, number, struct.pack(">I", num_bytes)))

    async def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Wait for frames until the condition holds."""
        async with asyncio.timeout(deadline_s):
            while not condition():
                assert not self.is_closed, "the server closed the connection"
                self._came.clear()
                await self._came.wait()

    async def read(self) -> None:
        """Take frames until the connection ends."""
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await self._reader.readexactly(9)
                    payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                    self._take(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
                    self._came.set()
        finally:
            self.is_closed = True
            self._came.set()

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        stream = self.streams.get(number, Stream())
        match kind:
            case Kind.SETTINGS | Kind.PING if not flags & ACK:
                self._writer.write(_frame(Kind(kind), ACK, 0, payload if kind == Kind.PING else b""))
            case Kind.DATA:
                stream.data += payload
            case Kind.HEADERS:
                stream.headers.append(payload)
            case Kind.RST_STREAM:
                stream.is_reset = True
        if kind in (Kind.DATA, Kind.HEADERS) and flags & END_STREAM:
            stream.is_ended = True


@asynccontextmanager
async def connect(port: int, window: int = 0) -> AsyncIterator[Wire]:
    """Open a connection whose calls may be sent `window` bytes each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wire = Wire(reader, writer, window)
    reading = asyncio.create_task(wire.read())
    try:
        yield wire
    finally:
        writer.close()
        reading.cancel()
        await asyncio.wait([reading])


def _frame(kind: Kind, flags: int, number: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", number) + payload


def _literal(name: str, value: str) -> bytes:
    """Return a header field that is neither indexed nor compressed (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
