"""One client's undelivered answer: deltas merge while the client does not read, up to a bound in bytes."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.router.chat.gains import ToolCallGain, merged_calls
from pdserve.router.instructions import Answer, Fail, Finish
from pdserve.router.output import Gain, PromptToken, Shown
from pdserve.router.packed import PackedPrompt, PackedTokens, num_entries, packed_bytes

PARCEL_BYTES = 32 * 1024
"""About what a front is given at once of a stream, so that what is with the transport stays small beside what waits here: in
protobuf it takes as much, in JSON with likely tokens ten times as much."""
MAX_LOOSE_TOKENS = 4
"""Tokens of a piece that is worth no packing, as long as it waits alone."""
CALL_BYTES = 320
"""What a piece of a tool call takes besides its text."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Something of what waited for the client, to be read in this order. `end` closes the answer.

    `prompt` comes once, whole, and before any gain; `gains` has at most one entry per sequence, by index.
    """

    prompt: Sequence[PromptToken] = ()
    gains: tuple[Gain, ...] = ()
    finished: tuple[Finish, ...] = ()
    end: Answer | Fail | None = None

    @property
    def num_entries(self) -> int:
        """How many tokens, and likely ones beside them, are named."""
        return num_entries(self.prompt) + sum(num_entries(gain.shown.tokens) for gain in self.gains)


class Mailbox:
    """Between the sessions of a request and the task that writes to its client. Putting never blocks.

    `max_bytes` None is for callers that take the whole answer at once: then the bound is the answer's own length. The bound is
    on what is put; each sequence takes about 1 KiB besides. Prompt scores are counted and not bounded: they come once, and
    are as many as the client sent tokens.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._prompt = PackedPrompt()
        self._waiting: dict[int, deque[_Pieces]] = {}
        """What each sequence gained, those first that waited longest."""
        self._finished: list[Finish] = []
        self._end: Answer | Fail | None = None
        self._wake = asyncio.Event()
        self._num_gain_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What waits, bytes of memory."""
        return self._num_gain_bytes + self._prompt.num_bytes

    def put_prompt(self, tokens: PackedPrompt) -> None:
        """Add the scores of the prompt."""
        self._prompt = tokens
        self._wake.set()

    def put(self, gain: Gain) -> bool:
        """Add text and tokens. Returns False once the bound is passed: the client must be given up.

        What passes it is kept all the same: if it was the last of a complete answer, the answer stays complete.
        """
        pieces = self._waiting.setdefault(gain.sequence, deque())
        if not pieces or (self._max_bytes is not None and pieces[-1].num_bytes >= PARCEL_BYTES):
            pieces.append(_Pieces(gain.sequence))
        self._num_gain_bytes += pieces[-1].add(gain.shown)
        self._wake.set()
        return self._max_bytes is None or self._num_gain_bytes <= self._max_bytes

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
        self._prompt = PackedPrompt()
        self._waiting.clear()
        self._num_gain_bytes = 0

    async def take(self, *, whole: bool = False) -> Parcel:
        """Wait for anything and return what waits, merged, or about `PARCEL_BYTES` of it; ends come with the last of it.

        `whole` waits for the end, and is for mailboxes without a bound, which give everything at once.
        """
        while not (self._end if whole else self._prompt or self._waiting or self._finished or self._end):
            self._wake.clear()
            await self._wake.wait()
        gains = self._take_gains()
        prompt, self._prompt = self._prompt, PackedPrompt()
        if self._waiting:
            return Parcel(prompt, gains)
        finished, self._finished = tuple(self._finished), []
        return Parcel(prompt, gains, finished, self._end)

    def _take_gains(self) -> tuple[Gain, ...]:
        taken: dict[int, _Pieces] = {}
        num_bytes = 0
        for sequence in list(self._waiting):
            num_more = self._waiting[sequence][0].num_bytes
            if taken and self._max_bytes is not None and num_bytes + num_more > PARCEL_BYTES:
                break
            pieces = self._waiting.pop(sequence)
            taken[sequence] = pieces.popleft()
            num_bytes += num_more
            if pieces:
                self._waiting[sequence] = pieces  # behind those that wait
        self._num_gain_bytes -= num_bytes
        return tuple(Gain(sequence, pieces.merged()) for sequence, pieces in sorted(taken.items()))


class _Pieces:
    """Consecutive pieces of one sequence, in flat memory. A small one that is taken before the next comes stays as it is."""

    __slots__ = ("_calls", "_matched_stop", "_only", "_reasoning", "_sequence", "_text", "_tokens", "num_bytes")

    _calls: list[ToolCallGain]
    _matched_stop: str | None
    _reasoning: bytearray
    _text: bytearray
    _tokens: PackedTokens

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._only: Shown | None = None
        self.num_bytes = 0

    def add(self, shown: Shown) -> int:
        """Add the next piece; return how many bytes it takes."""
        num_more = shown.num_text_bytes + CALL_BYTES * len(shown.tool_calls) + packed_bytes(shown.tokens)
        if not self.num_bytes:
            self._only = shown
        if self.num_bytes or len(shown.tokens) > MAX_LOOSE_TOKENS:
            self._pack(shown)
        self.num_bytes += num_more
        return num_more

    def merged(self) -> Shown:
        """Return them as one."""
        if self._only is not None:
            return self._only
        calls = merged_calls(self._calls) if self._calls else ()
        return Shown(self._text.decode(), self._tokens, self._matched_stop, self._reasoning.decode(), calls)

    def _pack(self, shown: Shown) -> None:
        if self._only is not None:
            first, self._only = self._only, None
            self._tokens, self._text, self._reasoning, self._calls = (
                PackedTokens(self._sequence),
                bytearray(),
                bytearray(),
                [],
            )
            if first is not shown:
                self._pack(first)
        self._text += shown.text.encode()
        self._reasoning += shown.reasoning.encode()
        self._calls += shown.tool_calls
        self._matched_stop = shown.matched_stop
        self._tokens.add(shown.tokens)
