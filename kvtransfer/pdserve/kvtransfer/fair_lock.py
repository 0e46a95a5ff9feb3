"""A lock that a busy thread cannot keep to itself."""

import threading
from types import TracebackType

from pdserve.core.errors import InternalError


class FairLock:
    """Goes to who waits for it before who held it last, if two threads share it; a plain lock mostly goes back to its holder.

    Whoever wants it stands at `_next` until it is free, so a holder that wants it again comes after. Not reentrant: taking it
    twice raises InternalError.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it, or is just taking it."""
        return self._next.locked()

    def pass_on(self) -> None:
        """Give it to who waits for it, if somebody does, and take it back. Only for its holder."""
        if self.is_wanted:
            self._release()
            self._acquire()

    def __enter__(self) -> None:
        self._acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _acquire(self) -> None:
        mine = threading.get_ident()
        if self._owner == mine:
            raise InternalError("a lock was taken twice; was a service looked at from within its own event?")
        with self._next:
            self._lock.acquire()
        self._owner = mine

    def _release(self) -> None:
        self._owner = None
        self._lock.release()
