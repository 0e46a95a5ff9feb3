"""Memory that two processes of one host share, and how it is passed between them: a memfd over an abstract Unix socket.

An abstract socket leaves no file behind, whatever becomes of its process, and a memfd goes with the last process that holds it.
Only processes of one user and one network namespace find each other; both look at the other's credentials (SO_PEERCRED).
The one that fills the memory makes it, seals its size, and the other maps it read-only.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
from dataclasses import dataclass

TOKEN_BYTES = 16
NONCE_BYTES = 32
HEAD_BYTES = mmap.PAGESIZE
"""In front of the slots: the nonce."""
MAX_ARENA_BYTES = 64 << 20
MAX_VISITORS = 64
"""Memory that was passed here and that no connection has claimed; beyond it the oldest is given up."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharingRefused(Exception):
    """The memory cannot be shared; the text says why, and the transport without it is used."""


def door_name(port: int) -> bytes:
    """Return the abstract name at which whoever listens at this TCP port takes memory."""
    return f"\0pdserve-kv-{os.geteuid()}-{port}".encode()


class OwnedArena:
    """Memory of one connection that this process fills, in slots of equal size. Once passed, `close` is its one way out."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Make it; raise OSError if the system has none to give."""
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        num_bytes = HEAD_BYTES + num_slots * slot_bytes
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            # A mapping whose file shrinks kills the process that reads it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._memory[:NONCE_BYTES] = self.nonce
        self._visit: socket.socket | None = None

    def pass_to(self, port: int) -> None:
        """Pass it to whoever listens at `port` on this host; raise SharingRefused if nobody of ours does."""
        visit = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            visit.setblocking(False)
            visit.connect(door_name(port))
            user = user_of(visit)
            if user == os.geteuid():
                socket.send_fds(visit, [self.token], [self._fd])
        except OSError as error:
            visit.close()
            raise SharingRefused(f"nobody on this host takes shared memory for port {port} ({error})") from error
        if user != os.geteuid():
            visit.close()
            raise SharingRefused(f"who takes shared memory for port {port} runs as user {user}")
        self._visit = visit

    def slot(self, number: int) -> memoryview:
        """Return a slot, writable."""
        start = HEAD_BYTES + number * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]

    def close(self) -> None:
        """Let go of it; what the other process mapped stays there until it lets go too."""
        if self._visit is not None:
            self._visit.close()
            self._visit = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _unmap(self._memory)


class MappedArena:
    """Memory that another process passed here, read-only."""

    def __init__(self, fd: int) -> None:
        """Map it and close `fd`; raise SharingRefused for memory that could change its size, or is too large."""
        try:
            size = os.fstat(fd).st_size
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise SharingRefused("the memory's size is not sealed")
            if not HEAD_BYTES < size <= MAX_ARENA_BYTES:
                raise SharingRefused(f"memory of {size} bytes, must be {HEAD_BYTES} to {MAX_ARENA_BYTES}")
            self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise SharingRefused(f"the descriptor is no memory to map ({error})") from error
        finally:
            os.close(fd)
        self.nonce = self._memory[:NONCE_BYTES]

    def copy(self, start: int, num_bytes: int) -> bytes | None:
        """Return a copy of bytes behind the head; None if they lie outside."""
        if start + num_bytes > len(self._memory) - HEAD_BYTES:
            return None
        return self._memory[HEAD_BYTES + start : HEAD_BYTES + start + num_bytes]

    def close(self) -> None:
        """Unmap it."""
        _unmap(self._memory)


@dataclass(slots=True)
class _Visitor:
    """A process that came to pass memory, and what it brought."""

    socket: socket.socket
    token: bytes = b""
    fd: int = -1


class ArenaDoor:
    """The Unix socket beside a listening port. Its descriptor is readable when there is something for `look` to do."""

    def __init__(self, port: int) -> None:
        """Bind; raise OSError if the name is taken."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(door_name(port))
            self._listener.listen(MAX_VISITORS)
        except BaseException:
            self._listener.close()
            raise
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._visitors: dict[int, _Visitor] = {}
        self.num_refused = 0

    @property
    def num_visitors(self) -> int:
        """Processes that came, and neither claimed what they brought nor left."""
        return len(self._visitors)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._epoll.fileno()

    def look(self) -> None:
        """Let visitors in, take what they bring, forget who left. Never waits."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._listener.fileno():
                self._let_in()
            elif (visitor := self._visitors.get(fd)) is not None:
                self._hear(visitor)

    def take(self, token: bytes) -> MappedArena:
        """Return the memory that was passed with `token`; raise SharingRefused if there is none that will do."""
        self.look()
        self.look()
        for visitor in list(self._visitors.values()):
            if visitor.token == token and visitor.fd >= 0:
                fd, visitor.fd = visitor.fd, -1
                self._dismiss(visitor)
                return MappedArena(fd)
        raise SharingRefused("no such memory came here")

    def close(self) -> None:
        """Close everything."""
        for visitor in list(self._visitors.values()):
            self._dismiss(visitor)
        self._epoll.close()
        self._listener.close()

    def _let_in(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                visit, _ = self._listener.accept()
                visit.setblocking(False)
                if user_of(visit) != os.geteuid():
                    self.num_refused += 1
                    visit.close()
                    continue
                if len(self._visitors) >= MAX_VISITORS:
                    # Memory is claimed at once or never: who came first waits in vain.
                    self.num_refused += 1
                    self._dismiss(next(iter(self._visitors.values())))
                self._visitors[visit.fileno()] = _Visitor(visit)
                self._epoll.register(visit, select.EPOLLIN)

    def _hear(self, visitor: _Visitor) -> None:
        try:
            token, fds, _, _ = socket.recv_fds(visitor.socket, TOKEN_BYTES + 1, 4)
        except BlockingIOError:
            return
        except OSError:
            token, fds = b"", []
        if visitor.fd < 0 and len(token) == TOKEN_BYTES and len(fds) == 1:
            visitor.token, visitor.fd = token, fds[0]
            return
        # It left, or says what nobody says.
        for fd in fds:
            os.close(fd)
        self._dismiss(visitor)

    def _dismiss(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.socket.fileno()]
        self._epoll.unregister(visitor.socket)
        visitor.socket.close()
        if visitor.fd >= 0:
            os.close(visitor.fd)


def user_of(other: socket.socket) -> int:
    """Return the user id that the process at the other end of a Unix socket had when it connected or listened."""
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", found)[1]
    return user


def _unmap(memory: mmap.mmap) -> None:
    # Who still holds a view keeps the mapping; it goes with the view.
    with contextlib.suppress(BufferError):
        memory.close()
