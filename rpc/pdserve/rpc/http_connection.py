"""One HTTP connection: uvicorn's, with what it lacks: a time for each request's head, one for what is sent, and an end to
connections without number.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_WAIT_S = 30.0
"""Time for the head of a request to arrive whole; for the first, from the connection's beginning."""
UNREAD_GRACE_S = 1.0
"""What a connection has beyond the time for its client to read: the answer gives up first, and says so in log and metrics."""


class BoundedConnection(H11Protocol):
    """A connection that is cut if a request's head, or what is left of a body that was refused, does not arrive in time, or if
    its client takes next to nothing of a full buffer (64 KiB) for `unread_s`. Closing one would wait for the client.

    Idle connections between requests are uvicorn's to end, bodies that are read are `body`'s. Beyond one and a half times
    `limit_concurrency` new connections are cut at once; between the two uvicorn answers 503.
    """

    unread_s = 60.0
    _head_wait: asyncio.TimerHandle | None = None
    _read_wait: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own signature
        """Begin the wait for the first head."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and 2 * len(self.connections) > 3 * self.limit_concurrency:
            transport.abort()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the wait ends with the head, and begins with the first byte of another."""
        super().data_received(data)
        if self._is_answering:
            self._end_wait()
        elif self._head_wait is None:
            self._await_head()

    def pause_writing(self) -> None:
        """Heed that the buffer is full."""
        super().pause_writing()
        self._read_wait = self.loop.call_later(self.unread_s + UNREAD_GRACE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Heed that the client took most of it."""
        super().resume_writing()
        self._end_read_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._end_wait()
        self._end_read_wait()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = (
            self.cycle
        )  # None before the first request, whatever uvicorn's annotation says
        return cycle is not None and not cycle.response_complete

    def _await_head(self) -> None:
        self._head_wait = self.loop.call_later(HEAD_WAIT_S, self._no_head)

    def _end_wait(self) -> None:
        if self._head_wait is not None:
            self._head_wait.cancel()
            self._head_wait = None

    def _end_read_wait(self) -> None:
        if self._read_wait is not None:
            self._read_wait.cancel()
            self._read_wait = None

    def _no_head(self) -> None:
        self._head_wait = None
        if not self._is_answering:
            self.transport.abort()
