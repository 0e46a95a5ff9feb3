"""One client's undelivered answer: deltas merge while the client does not read, up to a bound in bytes."""

import asyncio
from dataclasses import dataclass

from pdserve.router.instructions import Answer, Fail, Finish
from pdserve.router.output import Shown

TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Parcel:
    """Everything that waited for the client. `end` closes the answer."""

    shown: Shown
    finish: Finish | None
    end: Answer | Fail | None


class Mailbox:
    """Between a session and the task that writes to its client. Putting never blocks.

    `max_bytes` None is for callers that take the whole answer at once: then the bound is the answer's own length.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._shown: list[Shown] = []
        self._finish: Finish | None = None
        self._end: Answer | Fail | None = None
        self._wake = asyncio.Event()
        self.num_bytes = 0

    def put(self, shown: Shown) -> bool:
        """Add text and tokens. Returns False once the bound is passed: the client must be given up.

        What passes it is kept all the same: if it was the last of a complete answer, the answer stays complete.
        """
        self._shown.append(shown)
        self.num_bytes += len(shown.text.encode()) + TOKEN_BYTES * len(shown.tokens)
        self._wake.set()
        return self._max_bytes is None or self.num_bytes <= self._max_bytes

    def finish(self, finish: Finish) -> None:
        """Add the end of the sequence."""
        self._finish = finish
        self._wake.set()

    def close(self, end: Answer | Fail) -> None:
        """Add the end of the answer."""
        self._end = end
        self._wake.set()

    def discard(self) -> None:
        """Drop what is left: nobody will read it."""
        self._shown.clear()
        self.num_bytes = 0

    async def take(self, *, whole: bool = False) -> Parcel:
        """Wait for anything (`whole`: for the end) and return all that waits, merged."""
        while not (self._end if whole else self._shown or self._finish or self._end):
            self._wake.clear()
            await self._wake.wait()
        text = "".join(shown.text for shown in self._shown)
        tokens = tuple(token for shown in self._shown for token in shown.tokens)
        parcel = Parcel(Shown(text, tokens), self._finish, self._end)
        self._shown.clear()
        self._finish = None
        self.num_bytes = 0
        return parcel
