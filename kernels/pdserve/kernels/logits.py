"""One sampled row: how it is sampled, what its processors know of the sequence, what it gets. `processors` applies the state.

A `RowState` is made from token ids alone, so that a sequence that was handed over, resumed or split is sampled as one that was
not. This file needs no torch: schedulers plan with `SampledRow`.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.core.work import Sampling, TopLogprobs

IdArray = NDArray[np.int64]
MaskArray = NDArray[np.int32]

WORD_BITS = 32
"""Token ids per word of a mask: bit `t % 32` of word `t // 32`, low bit first, says whether token t is allowed."""
LEAST_ROOM = 64


class ConstraintFailed(Exception):
    """A matcher cannot say which tokens may follow; the text says why, in a line. It fails its row, never the step."""


class Matcher(Protocol):
    """Where one sequence stands in a language, e.g. a grammar."""

    def accept(self, token_id: int) -> None:
        """Move on by a token of the sequence. Never raises: a matcher that breaks says so at its next `fill`."""
        ...

    def fill(self, mask: MaskArray) -> None:
        """Set the bits of the tokens that may follow in `mask` [ceil(vocabulary / 32)], whose bits are all 0.

        Raises ConstraintFailed.
        """
        ...


class RowState:
    """One sequence as its processors see it: its ids so far, counted. `accept` each token that is chosen for it.

    `end_ids` end the sequence, and are not chosen before output index `min_tokens`. `matcher` stands at the beginning of the
    answer: it is given `output_ids` here. One owner; not thread-safe.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        end_ids: Collection[int] = frozenset(),
        min_tokens: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        self.sampling = sampling
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.bias_values = np.array([value for _, value in sampling.logit_bias], np.float32)
        self._allowed: MaskArray | None = None
        self._end_ids = _id_array(end_ids)
        self._min_tokens = min_tokens
        self._matcher = matcher
        self._num_outputs = len(output_ids)
        self._outputs = IdCounts(output_ids)
        self._context = IdCounts((*prompt_ids, *output_ids)) if sampling.repetition_penalty != 1.0 else None
        self._banned = _id_array({*sampling.banned_token_ids, *(ids[0] for ids in _of_length(sampling, 1))})
        self._phrases = _by_last_prefix_id(sampling)
        self._tail_len = max((len(ids) - 1 for ids in sampling.banned_sequences), default=0)
        self._tail = [*prompt_ids[-self._tail_len :], *output_ids][-self._tail_len :] if self._tail_len else []
        if matcher is not None:
            for token_id in output_ids:
                matcher.accept(token_id)

    @staticmethod
    def is_needed(sampling: Sampling, min_tokens: int = 0) -> bool:
        """Whether a row with these parameters needs a state; one that needs none may have one."""
        return min_tokens > 0 or sampling.changes_logits

    @property
    def position(self) -> int:
        """Absolute output index of the next token."""
        return self._num_outputs

    def accept(self, token_id: int) -> None:
        """Take in the token at `position`."""
        self._num_outputs += 1
        self._outputs.add(token_id)
        if self._context is not None:
            self._context.add(token_id)
        if self._tail_len:
            self._tail = [*self._tail, token_id][-self._tail_len :]
        if self._matcher is not None:
            self._matcher.accept(token_id)

    @property
    def context_ids(self) -> IdArray:
        """Distinct ids of prompt and output; only kept where there is a repetition penalty."""
        return self._context.ids if self._context is not None else np.empty(0, np.int64)

    @property
    def output_counts(self) -> tuple[IdArray, NDArray[np.float32]]:
        """Distinct ids of the output and how often each occurs."""
        return self._outputs.ids, self._outputs.counts

    @property
    def has_mask(self) -> bool:
        """Whether `mask` forbids anything."""
        return self._matcher is not None or bool(self.sampling.allowed_token_ids)

    def forbidden_ids(self) -> IdArray:
        """Ids that may not come next: banned ids, ends of banned sequences that have begun, and ends before `min_tokens`."""
        completed = [last for prefix, last in self._phrases_begun() if self._tail[-len(prefix) :] == prefix]
        parts = [self._banned, np.array(completed, np.int64)]
        if self._num_outputs < self._min_tokens:
            parts.append(self._end_ids)
        return np.concatenate(parts)

    def mask(self, vocab_size: int) -> MaskArray:
        """Return the ids that grammar and `allowed_token_ids` allow, [ceil(vocabulary / 32)]. Raises ConstraintFailed."""
        if self._allowed is None and self.sampling.allowed_token_ids:
            self._allowed = _mask_of(self.sampling.allowed_token_ids, vocab_size)
        if self._matcher is None and self._allowed is not None:
            return self._allowed
        words = np.zeros(-(-vocab_size // WORD_BITS), np.int32)
        if self._matcher is not None:
            self._matcher.fill(words)
        return words if self._allowed is None else words & self._allowed

    def _phrases_begun(self) -> Iterable[tuple[list[int], int]]:
        return self._phrases.get(self._tail[-1], ()) if self._tail else ()


@dataclass(frozen=True, slots=True)
class SampledRow:
    """How one row is sampled.

    `position` is the absolute output index of the token, `sequence` the number of its sequence in the request; `num_top` most
    likely tokens are reported beside it. `state` may be None where `RowState.is_needed` says so.
    """

    sampling: Sampling
    sequence: int
    position: int
    num_top: int = 0
    state: RowState | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.state is None and self.sampling.changes_logits:
            raise ValueError("a row whose parameters change logits has a state")
        if self.state is not None and self.state.position != self.position:
            raise ValueError(f"a row at output index {self.position} has the state of index {self.state.position}")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A drawn token, its natural log-probability under the unmodified distribution, and the most likely ones beside it."""

    token_id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class RowFailed:
    """No token could be chosen for this row; `reason` says why, in a line. The other rows of the step are not touched.

    `is_final` says that another try would end the same way, on any node: the request is at fault, not the machine.
    """

    reason: str
    is_final: bool = False


Choice = Chosen | RowFailed
"""What a sampled row got."""


class IdCounts:
    """Distinct ids and how often each came, as arrays that grow in place."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        ids, counts = np.unique(np.array(token_ids, np.int64), return_counts=True)
        self._num = len(ids)
        self._ids = np.concatenate((ids, np.zeros(LEAST_ROOM, np.int64)))
        self._counts = np.concatenate((counts, np.zeros(LEAST_ROOM))).astype(np.float32)
        self._slots = {int(token): slot for slot, token in enumerate(ids)}

    @property
    def ids(self) -> IdArray:
        """Distinct ids, in no order."""
        return self._ids[: self._num]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` came."""
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        """Count one more."""
        slot = self._slots.setdefault(token_id, self._num)
        if slot == self._num:
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token_id
            self._num += 1
        self._counts[slot] += 1


def _id_array(token_ids: Collection[int]) -> IdArray:
    return np.array(sorted(token_ids), np.int64)


def _of_length(sampling: Sampling, length: int) -> list[tuple[int, ...]]:
    return [ids for ids in sampling.banned_sequences if len(ids) == length]


def _by_last_prefix_id(sampling: Sampling) -> dict[int, list[tuple[list[int], int]]]:
    """Return (prefix, last id) of each banned sequence of several ids, by the last id of the prefix."""
    phrases: dict[int, list[tuple[list[int], int]]] = {}
    for ids in sampling.banned_sequences:
        if len(ids) > 1:
            phrases.setdefault(ids[-2], []).append((list(ids[:-1]), ids[-1]))
    return phrases


def _mask_of(token_ids: Collection[int], vocab_size: int) -> MaskArray:
    bits = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.uint8)
    ids = _id_array(token_ids)
    bits[ids[ids < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
