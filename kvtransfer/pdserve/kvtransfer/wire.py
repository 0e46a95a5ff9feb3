"""The envelope of a frame and its primitive fields: little-endian, strict, sealed with a checksum.

Envelope: magic `PDKV`, one byte of kind, the body, then xxh3-64 over all of that, 8 bytes. The envelope never changes between
protocol versions, so that two versions can still refuse each other by name. Every malformed input is a `FrameError`.
"""

import math
import struct
from collections.abc import Callable
from typing import TypeVar

import xxhash

MAGIC = b"PDKV"
SEAL_BYTES = 8
MAX_HEADER_BYTES = 64 << 10
"""A header frame is at most this long; longer ones are refused unread."""

T = TypeVar("T")

_NUMBERS = {code: struct.Struct("<" + code) for code in "BHIQ"}
_REAL = struct.Struct("<d")
_SPAN = struct.Struct("<II")


class FrameError(ValueError):
    """Bytes that are no frame of this protocol; the message names what is wrong with them."""


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """Return xxh3-64 of a contiguous buffer."""
    return xxhash.xxh3_64_intdigest(payload)


class FrameWriter:
    """Appends fields to a frame of one kind; `seal` ends it."""

    def __init__(self, kind: int) -> None:
        self._parts = bytearray(MAGIC)
        self._parts.append(kind)

    def number(self, code: str, value: float) -> None:
        """Append one number by its `struct` code (B, H, I, Q, d); raise FrameError if it does not fit."""
        try:
            self._parts += struct.pack("<" + code, value)
        except struct.error as error:
            raise FrameError(f"{value!r} does not fit a field of type {code}: {error}") from error

    def numbers(self, layout: struct.Struct, *values: int) -> None:
        """Append consecutive numbers; raise FrameError if one does not fit its field."""
        try:
            self._parts += layout.pack(*values)
        except struct.error as error:
            raise FrameError(f"{values} do not fit fields of types {layout.format}: {error}") from error

    def flag(self, value: bool) -> None:
        """Append a truth value, one byte."""
        self._parts.append(int(value))

    def raw(self, value: bytes, length: int) -> None:
        """Append exactly `length` bytes."""
        if len(value) != length:
            raise FrameError(f"a field of {length} bytes was given {len(value)}")
        self._parts += value

    def text(self, value: str) -> None:
        """Append a string: its length in UTF-8 bytes (16 bits), then the bytes; cut to what fits."""
        encoded = value.encode("utf-8", "replace")
        if len(encoded) > 0xFFFF:
            encoded = encoded[:0xFFFF].decode("utf-8", "ignore").encode()
        self.number("H", len(encoded))
        self._parts += encoded

    def span(self, value: range) -> None:
        """Append a half-open range, two 32-bit numbers."""
        self.numbers(_SPAN, value.start, value.stop)

    def seal(self) -> bytes:
        """Return the finished frame; raise FrameError if it is longer than any receiver accepts."""
        if len(self._parts) + SEAL_BYTES > MAX_HEADER_BYTES:
            raise FrameError(f"a header frame of {len(self._parts)} bytes is too long")
        return bytes(self._parts) + struct.pack("<Q", xxhash.xxh3_64_intdigest(self._parts))


class FrameReader:
    """Reads the fields of one sealed frame in order; `end` insists that none is left."""

    def __init__(self, frame: bytes | memoryview) -> None:
        """Check envelope and seal; raise FrameError naming what is wrong."""
        shortest = len(MAGIC) + 1 + SEAL_BYTES
        if not shortest <= len(frame) <= MAX_HEADER_BYTES:
            raise FrameError(f"length: {len(frame)} bytes, must be {shortest} to {MAX_HEADER_BYTES}")
        data = bytes(frame)
        if data[: len(MAGIC)] != MAGIC:
            raise FrameError("magic: not a frame of this protocol")
        self._data = data[:-SEAL_BYTES]
        if xxhash.xxh3_64_intdigest(self._data) != int.from_bytes(data[-SEAL_BYTES:], "little"):
            raise FrameError("seal: the frame's checksum does not match")
        self.kind = data[len(MAGIC)]
        self._at = len(MAGIC) + 1

    def raw(self, length: int) -> bytes:
        """Read exactly `length` bytes."""
        end = self._at + length
        if end > len(self._data):
            raise FrameError(f"truncated: {length} bytes wanted, {len(self._data) - self._at} left")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def integer(self, code: str) -> int:
        """Read one unsigned integer by its `struct` code (B, H, I, Q)."""
        return self.integers(_NUMBERS[code])[0]

    def integers(self, layout: struct.Struct) -> tuple[int, ...]:
        """Read consecutive unsigned integers."""
        return layout.unpack(self.raw(layout.size))

    def real(self) -> float:
        """Read a finite 64-bit float."""
        value: float = _REAL.unpack(self.raw(_REAL.size))[0]
        if not math.isfinite(value):
            raise FrameError(f"number: {value} is not finite")
        return value

    def flag(self) -> bool:
        """Read a truth value."""
        value = self.integer("B")
        if value > 1:
            raise FrameError(f"flag: {value} is neither 0 nor 1")
        return value == 1

    def text(self) -> str:
        """Read a string."""
        try:
            return self.raw(self.integer("H")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FrameError(f"text: not UTF-8: {error.reason}") from error

    def span(self) -> range:
        """Read a non-empty half-open range."""
        start, stop = self.integers(_SPAN)
        if start >= stop:
            raise FrameError(f"range: [{start}, {stop}) is empty")
        return range(start, stop)

    def many(self, read: Callable[[], T]) -> tuple[T, ...]:
        """Read a count (16 bits) and that many items."""
        return tuple(read() for _ in range(self.integer("H")))

    def skip_rest(self) -> None:
        """Pass over what another version of the protocol put here."""
        self._at = len(self._data)

    def end(self) -> None:
        """Raise FrameError if bytes are left."""
        if self._at != len(self._data):
            raise FrameError(f"trailing: {len(self._data) - self._at} bytes too many")
