"""A TCP relay between two ends, for tests of what a network does to connections, and of what it can read."""

import contextlib
import select
import socket
import threading


class Wire:
    """A TCP relay that can close its connections, or lose all they carry without a word, as a firewall does to idle ones."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._muted: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self.carried = bytearray()
        """All bytes, both ways."""
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._door.getsockname()[1]}"

    def drop(self) -> None:
        """Close all present connections."""
        with self._lock:
            for each in (end for pair in self._pairs for end in pair):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mute(self) -> None:
        """Carry nothing more on the present connections, and close none."""
        with self._lock:
            self._muted |= {end for pair in self._pairs for end in pair}

    def close(self) -> None:
        self._is_over = True
        self._wake_out.send(b"x")
        self._thread.join(30)
        for each in (self._door, self._wake_in, self._wake_out, *(end for pair in self._pairs for end in pair)):
            each.close()

    def _relay(self) -> None:
        while not self._is_over:
            with self._lock:
                other = {a: b for pair in self._pairs for a, b in (pair, pair[::-1])}
            for ready in select.select([self._door, self._wake_in, *other], [], [])[0]:
                if ready is self._door:
                    near = self._door.accept()[0]
                    with self._lock:
                        self._pairs.append((near, socket.create_connection(self._to)))
                elif ready is not self._wake_in:
                    self._carry(ready, other[ready])

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        content = b""
        with contextlib.suppress(OSError):
            content = source.recv(1 << 16)
        if content and source in self._muted:
            return
        with contextlib.suppress(OSError):
            if content:
                self.carried += content
                target.sendall(content)
                return
            target.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._pairs = [pair for pair in self._pairs if source not in pair]
        source.close()
        target.close()
