"""A peer written with raw sockets that speaks ZMTP as badly as it likes (https://rfc.zeromq.org/spec/23, /24)."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MIB = 1 << 20
WAIT_S = 30.0
MORE, LONG, COMMAND = 1, 2, 4


def greeting(mechanism: bytes, *, as_server: bool = False) -> bytes:
    """The 64 bytes that each side begins with."""
    return SIGNATURE + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def framed(flags: int, body: bytes, size: int | None = None) -> bytes:
    """A frame; `size` says another length than it has."""
    length = len(body) if size is None else size
    if length > 255:
        return bytes([flags | LONG]) + struct.pack(">Q", length) + body
    return bytes([flags, length]) + body


def command(name: bytes, body: bytes) -> bytes:
    """A command of the handshake."""
    return framed(COMMAND, bytes([len(name)]) + name + body)


def plain_hello(username: bytes, password: bytes) -> bytes:
    return command(b"HELLO", bytes([len(username)]) + username + bytes([len(password)]) + password)


def metadata(**properties: bytes) -> bytes:
    """Properties of READY or INITIATE; underscores of names stand for hyphens."""
    named = {name.replace("_", "-").encode(): value for name, value in properties.items()}
    return b"".join(bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in named.items())


class Peer:
    """One TCP connection. What is sent after the other side hung up is lost without a word, as an attacker would have it."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self.num_sent = 0

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def say(self, content: bytes) -> bool:
        """Send; False once the other side does not take any more."""
        try:
            self.socket.sendall(content)
        except OSError:
            return False
        self.num_sent += len(content)
        return True

    def heard(self, num_bytes: int) -> bytes:
        """Read exactly so many bytes, or up to the end."""
        content = b""
        with contextlib.suppress(ConnectionError):
            while len(content) < num_bytes and (more := self.socket.recv(num_bytes - len(content))):
                content += more
        return content

    def greet(self, mechanism: bytes) -> None:
        """Exchange greetings."""
        self.say(greeting(mechanism))
        self.heard(64)

    def ask(self, content: bytes) -> bytes:
        """Send a command and read the answer to it, or nothing up to the end."""
        self.say(content)
        head = self.heard(2)
        return head + self.heard(head[1]) if len(head) == 2 else head

    def is_hung_up_on(self) -> bool:
        """Wait for the end of the connection; raises TimeoutError if it does not come."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def endless_message(self, limit_bytes: int) -> int:
        """Send 1 MiB frames of one message, each with MORE, until the other side has had enough; return the bytes sent."""
        frame, before = framed(MORE, bytes(MIB)), self.num_sent
        while self.num_sent - before < limit_bytes and self.say(frame):
            pass
        return self.num_sent - before


def take_id(peer: Peer, routing_id: bytes, mechanism: bytes) -> None:
    """Ask a ROUTER to be filed under this id, and send it a message."""
    peer.greet(mechanism)
    if mechanism == b"PLAIN":
        peer.ask(plain_hello(bytes(32), bytes(32)))
    name = b"INITIATE" if mechanism == b"PLAIN" else b"READY"
    peer.ask(command(name, metadata(Socket_Type=b"DEALER", Identity=routing_id)))
    peer.say(framed(0, b"x"))


def endless_without_a_password(peer: Peer) -> None:
    peer.greet(b"NULL")
    peer.ask(command(b"READY", metadata(Socket_Type=b"DEALER")))
    peer.endless_message(256 * MIB)


def endless_with_a_wrong_password(peer: Peer) -> None:
    peer.greet(b"PLAIN")
    peer.ask(plain_hello(bytes(32), bytes(32)))
    peer.endless_message(256 * MIB)


def data_before_hello(peer: Peer) -> None:
    peer.say(greeting(b"PLAIN"))
    peer.endless_message(256 * MIB)


def a_huge_command(peer: Peer) -> None:
    peer.say(greeting(b"PLAIN") + framed(COMMAND, b"\x05HELLO" + bytes(MIB - 6)))
    peer.endless_message(256 * MIB)


def chosen_ids(peer: Peer) -> None:
    take_id(peer, bytes(5), b"NULL")


def chosen_ids_after_hello(peer: Peer) -> None:
    take_id(peer, bytes(5), b"PLAIN")


def wrong_lengths(peer: Peer) -> None:
    peer.say(greeting(b"PLAIN") + framed(COMMAND, b"\x05HELLO\xff\xff", size=(1 << 63) - 1))
    peer.endless_message(MIB)


def an_empty_command(peer: Peer) -> None:
    peer.say(greeting(b"PLAIN") + framed(COMMAND, b"") + framed(COMMAND, b"\xff") + plain_hello(b"", b""))


ATTACKS: dict[str, Callable[[Peer], None]] = {
    attack.__name__.replace("_", " "): attack
    for attack in (
        endless_without_a_password,
        endless_with_a_wrong_password,
        data_before_hello,
        a_huge_command,
        chosen_ids,
        chosen_ids_after_hello,
        wrong_lengths,
        an_empty_command,
    )
}


class Impostor:
    """Listens like a decode node, lets everyone in, and then sends one endless message to each."""

    def __init__(self, limit_bytes: int = 256 * MIB) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self._limit_bytes = limit_bytes
        self.heard = bytearray()
        """What dialling peers sent."""
        self.num_sent = 0
        self.served = threading.Semaphore(0)
        """Released once for each peer that was served to its end."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._door.getsockname()[1]}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._door.accept()[0]
                near.settimeout(WAIT_S)
                with near, contextlib.suppress(OSError):
                    self._deceive(near)
                self.served.release()

    def _deceive(self, near: socket.socket) -> None:
        near.sendall(greeting(b"PLAIN", as_server=True))
        self._hear(near, 64)
        for answer in (command(b"WELCOME", b""), command(b"READY", metadata(Socket_Type=b"ROUTER"))):
            _, length = self._hear(near, 2)
            self._hear(near, length)
            near.sendall(answer)
        frame = framed(MORE, bytes(MIB))
        while self.num_sent < self._limit_bytes:
            near.sendall(frame)
            self.num_sent += len(frame)

    def _hear(self, near: socket.socket, num_bytes: int) -> bytes:
        content = b""
        while len(content) < num_bytes:
            more = near.recv(num_bytes - len(content))
            if not more:
                raise ConnectionResetError
            content += more
        self.heard += content
        return content
