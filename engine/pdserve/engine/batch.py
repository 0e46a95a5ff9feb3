"""What a step is given and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.work import Sampling


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """New tokens of one sequence, from absolute position `start`.

    `block_ids` covers positions 0 … start + len(token_ids) - 1 at least; positions before `start` are already in the pool. If
    `sampling` is given, the token after the last position is sampled, as output token `next_index` of `sequence`.
    """

    token_ids: tuple[int, ...]
    start: int
    block_ids: Sequence[int]
    sampling: Sampling | None = None
    sequence: int = 0
    next_index: int = 0


@dataclass(frozen=True, slots=True)
class RowFailed:
    """No token could be chosen for this chunk; `reason` says why, in a line. The other chunks of the step are not touched."""

    reason: str


Choice = tuple[int, float] | RowFailed | None
"""What a chunk got: (token id, natural log-probability under the unmodified distribution), a failure, or nothing asked."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per chunk of the step, in order: (token id, natural log-probability under the unmodified distribution).

    None where the chunk asked for no token; `RowFailed` where it asked, and its logits define no distribution.
    """

    tokens: tuple[Choice, ...]
