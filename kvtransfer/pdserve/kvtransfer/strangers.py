"""Connections whose peer has proven nothing yet: few at once, and cut off when they send more than a greeting.

libzmq accepts whoever comes, and takes up to a frame from each before its handshake decides. Here they are kept few: the oldest
makes room for the newest, so that nobody can shut others out by holding connections open. libzmq offers no way to close one
connection, so its descriptor, which the socket's monitor tells, is shut down.
"""

import errno
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TypeVar

MAX_STRANGERS = 64
"""Accepted connections that have proven nothing yet. An honest one is among them for some milliseconds."""
GREETING_BYTES = 64 << 10
"""More than both handshakes take, whatever names the identity has."""
LOOK_S = 0.01
"""How long what strangers send goes unseen."""
T = TypeVar("T")
_SO_COOKIE = 57
_BYTES_RECEIVED = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """Which connection a descriptor was seen to be, for descriptors are used again."""

    cookie: bytes
    is_accepted: bool


class _Fate(Enum):
    """What a look at a descriptor found."""

    STAYS = auto()
    CUT = auto()
    ANOTHER = auto()
    """The descriptor is another connection's by now."""


class Strangers:
    """Descriptors of unproven connections, oldest first. Used by the channel's thread."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        self.num_cut = 0

    def __bool__(self) -> bool:
        return bool(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def came(self, fd: int, *, is_accepted: bool) -> None:
        """Watch a new connection: one that was accepted, or one that was dialled."""
        self._connections.pop(fd, None)
        cookie = _told(fd, _cookie)
        if cookie is not None:
            self._connections[fd] = _Connection(cookie, is_accepted)

    def forget(self, fd: int) -> None:
        """The connection is gone, or its peer has proven itself."""
        self._connections.pop(fd, None)

    def cut(self) -> None:
        """Shut down those that sent too much, and the oldest beyond the bound."""
        num_over = sum(known.is_accepted for known in self._connections.values()) - MAX_STRANGERS
        for fd, known in list(self._connections.items()):
            is_over = known.is_accepted and num_over > 0
            num_over -= is_over
            fate = _told(fd, partial(_judged, known, is_over=is_over))
            if fate is not _Fate.STAYS:
                del self._connections[fd]
                self.num_cut += fate is _Fate.CUT


def _told(fd: int, ask: Callable[[socket.socket], T]) -> T | None:
    """Return what `ask` says of a descriptor that libzmq owns, and may close at any moment: then None."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        return ask(connection)
    except OSError:
        return None
    finally:
        connection.detach()


def _cookie(connection: socket.socket) -> bytes:
    """Return what no other socket of this host ever has; raises OSError for one that is no TCP connection."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        raise OSError(errno.ENOTCONN, "no TCP socket")
    return connection.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8) if sys.platform == "linux" else b""


def _received_bytes(connection: socket.socket) -> int:
    """Return what TCP has received in all; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]) if len(info) >= _BYTES_RECEIVED + 8 else 0


def _judged(known: _Connection, connection: socket.socket, *, is_over: bool) -> _Fate:
    if _cookie(connection) != known.cookie:
        return _Fate.ANOTHER
    if not is_over and _received_bytes(connection) <= GREETING_BYTES:
        return _Fate.STAYS
    # A reset once libzmq closes it: nothing of the connection is left in the kernel either.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)
    return _Fate.CUT
