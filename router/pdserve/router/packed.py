"""Tokens that wait for a client, in flat arrays: what one takes is known, and little.

Measured with tracemalloc on CPython 3.11 (`tests/router/test_packed.py` does it again): as objects a token takes 176 bytes with
its numbers, and each likely token beside it 122; here `TOKEN_BYTES` and `TOP_BYTES`, and up to a tenth more that arrays
keep in advance. Log-probabilities are 32-bit numbers, as the nodes send them.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from pdserve.core.work import SampledToken, TokenScore, TopLogprobs
from pdserve.router.output import PromptToken

TOKEN_BYTES = 16
"""Index, id, log-probability, and where its likely tokens end."""
TOP_BYTES = 8
"""What a likely token at a position takes: its id and its log-probability."""
SCORE_BYTES = 48
"""What the score of a prompt token takes besides its likely tokens: a bytes object, its slot, the log-probability."""


class PackedTokens(Sequence[SampledToken]):
    """Sampled tokens of one sequence, in order; `finish_reason` is not kept. Grows by `add`."""

    __slots__ = ("_ids", "_indexes", "_logprobs", "_sequence", "_top_ends", "_top_ids", "_top_logprobs")

    def __init__(self, sequence: int, tokens: Iterable[SampledToken] = ()) -> None:
        self._sequence = sequence
        self._indexes, self._ids, self._logprobs = array("I"), array("I"), array("f")
        self._top_ends, self._top_ids, self._top_logprobs = array("I"), array("I"), array("f")
        self.add(tokens)

    def add(self, tokens: Iterable[SampledToken]) -> None:
        """Add the next tokens."""
        for token in tokens:
            self._indexes.append(token.index)
            self._ids.append(token.token_id)
            self._logprobs.append(token.logprob)
            if token.top:
                self._top_ids.extend([token_id for token_id, _ in token.top])
                self._top_logprobs.extend([logprob for _, logprob in token.top])
            self._top_ends.append(len(self._top_ids))

    @property
    def num_entries(self) -> int:
        """How many tokens, and likely ones beside them, are named."""
        return len(self._ids) + len(self._top_ids)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._ids)

    def __iter__(self) -> Iterator[SampledToken]:
        """Yield each token as an object, which lives no longer than its reader wants."""
        return map(self._at, range(len(self._ids)))

    @overload
    def __getitem__(self, place: int) -> SampledToken: ...

    @overload
    def __getitem__(self, place: slice) -> "PackedTokens": ...

    def __getitem__(self, place: int | slice) -> "SampledToken | PackedTokens":
        """Return one token, or some, packed."""
        every = range(len(self._ids))[place]
        if isinstance(every, range):
            return PackedTokens(self._sequence, map(self._at, every))
        return self._at(every)

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a sequence of the same tokens."""
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        """Show the tokens."""
        return f"PackedTokens({self._sequence}, {list(self)})"

    def _at(self, place: int) -> SampledToken:
        first, end = self._top_ends[place - 1] if place else 0, self._top_ends[place]
        top = tuple(zip(self._top_ids[first:end], self._top_logprobs[first:end], strict=True)) if end > first else ()
        return SampledToken(
            self._indexes[place], self._ids[place], self._logprobs[place], sequence=self._sequence, top=top
        )


class PackedPrompt(Sequence[PromptToken]):
    """The tokens of a prompt, or of a part of it, with their scores as `packed_score` makes them; None for the first."""

    __slots__ = ("_ids", "_scores")

    def __init__(self, ids: Sequence[int] = (), scores: Sequence[bytes | None] = ()) -> None:
        self._ids, self._scores = ids, scores

    @property
    def num_bytes(self) -> int:
        """What the scores take, bytes."""
        return TOP_BYTES * (self.num_entries - len(self)) + SCORE_BYTES * len(self)

    @property
    def num_entries(self) -> int:
        """How many tokens, and likely ones beside them, are named."""
        return len(self) + sum(len(score) // TOP_BYTES for score in self._scores if score is not None)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._ids)

    def __iter__(self) -> Iterator[PromptToken]:
        """Yield each token as an object, which lives no longer than its reader wants."""
        return map(_scored, self._ids, self._scores)

    @overload
    def __getitem__(self, place: int) -> PromptToken: ...

    @overload
    def __getitem__(self, place: slice) -> "PackedPrompt": ...

    def __getitem__(self, place: int | slice) -> "PromptToken | PackedPrompt":
        """Return one token, or some, packed."""
        if isinstance(place, slice):
            return PackedPrompt(self._ids[place], self._scores[place])
        return _scored(self._ids[place], self._scores[place])

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a sequence of the same tokens."""
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __repr__(self) -> str:
        """Show the tokens."""
        return f"PackedPrompt({list(self)})"


def packed_score(score: TokenScore) -> bytes:
    """Return a score as bytes: the log-probability, then the ids, then the log-probabilities of the likely tokens."""
    ids, logprobs = array("I"), array("f", (score.logprob,))
    for token_id, logprob in score.top:
        ids.append(token_id)
        logprobs.append(logprob)
    return logprobs[:1].tobytes() + ids.tobytes() + logprobs[1:].tobytes()


def _scored(token_id: int, score: bytes | None) -> PromptToken:
    if score is None:
        return PromptToken(token_id, None)
    num_top = len(score) // TOP_BYTES
    logprobs, ids = array("f", score[:4] + score[4 + 4 * num_top :]), array("I", score[4 : 4 + 4 * num_top])
    top: TopLogprobs = tuple(zip(ids, logprobs[1:], strict=True))
    return PromptToken(token_id, logprobs[0], top)


def num_entries(tokens: Sequence[SampledToken] | Sequence[PromptToken]) -> int:
    """Return how many tokens, and likely ones beside them, are named."""
    if isinstance(tokens, PackedTokens | PackedPrompt):
        return tokens.num_entries
    return sum(1 + len(token.top) for token in tokens)


def packed_bytes(tokens: Sequence[SampledToken]) -> int:
    """Return what tokens take once they are packed, bytes."""
    return TOKEN_BYTES * len(tokens) + TOP_BYTES * (num_entries(tokens) - len(tokens))
