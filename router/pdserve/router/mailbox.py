"""One client's undelivered answer: deltas merge while the client does not read, up to a bound in bytes."""

import asyncio
from dataclasses import dataclass

from pdserve.router.instructions import Answer, Fail, Finish
from pdserve.router.output import Gain, PromptToken, Shown, joined

TOKEN_BYTES = 8
TOP_BYTES = 8
"""What a likely token at a position costs: its id and its log-probability."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Everything that waited for the client, to be read in this order. `end` closes the answer.

    `prompt` comes once, whole, and before any gain; `gains` has at most one entry per sequence, by index.
    """

    prompt: tuple[PromptToken, ...] = ()
    gains: tuple[Gain, ...] = ()
    finished: tuple[Finish, ...] = ()
    end: Answer | Fail | None = None

    @property
    def num_entries(self) -> int:
        """How many tokens, and likely ones beside them, are named."""
        every = [token for gain in self.gains for token in gain.shown.tokens]
        return sum(1 + len(token.top) for token in every) + sum(1 + len(token.top) for token in self.prompt)


class Mailbox:
    """Between the sessions of a request and the task that writes to its client. Putting never blocks.

    `max_bytes` None is for callers that take the whole answer at once: then the bound is the answer's own length. Prompt scores
    do not count: they are bounded by the prompt that the client sent.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._prompt: tuple[PromptToken, ...] = ()
        self._gains: dict[int, list[Shown]] = {}
        self._finished: list[Finish] = []
        self._end: Answer | Fail | None = None
        self._wake = asyncio.Event()
        self.num_bytes = 0

    def put_prompt(self, tokens: tuple[PromptToken, ...]) -> None:
        """Add the scores of the prompt."""
        self._prompt = tokens
        self._wake.set()

    def put(self, gain: Gain) -> bool:
        """Add text and tokens. Returns False once the bound is passed: the client must be given up.

        What passes it is kept all the same: if it was the last of a complete answer, the answer stays complete.
        """
        shown = gain.shown
        self._gains.setdefault(gain.sequence, []).append(shown)
        num_top = sum(len(token.top) for token in shown.tokens)
        self.num_bytes += shown.num_text_bytes + TOKEN_BYTES * len(shown.tokens) + TOP_BYTES * num_top
        self._wake.set()
        return self._max_bytes is None or self.num_bytes <= self._max_bytes

    def finish(self, finish: Finish) -> None:
        """Add the end of a sequence."""
        self._finished.append(finish)
        self._wake.set()

    def close(self, end: Answer | Fail) -> None:
        """Add the end of the answer."""
        self._end = end
        self._wake.set()

    def discard(self) -> None:
        """Drop what is left: nobody will read it."""
        self._prompt = ()
        self._gains.clear()
        self.num_bytes = 0

    async def take(self, *, whole: bool = False) -> Parcel:
        """Wait for anything (`whole`: for the end) and return all that waits, merged."""
        while not (self._end if whole else self._prompt or self._gains or self._finished or self._end):
            self._wake.clear()
            await self._wake.wait()
        gains = tuple(Gain(sequence, joined(pieces)) for sequence, pieces in sorted(self._gains.items()))
        parcel = Parcel(self._prompt, gains, tuple(self._finished), self._end)
        self._prompt = ()
        self._gains.clear()
        self._finished.clear()
        self.num_bytes = 0
        return parcel
