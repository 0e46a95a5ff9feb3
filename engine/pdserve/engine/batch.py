"""What a step is given and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.work import TokenScore
from pdserve.kernels.logits import Choice, Chosen, RowFailed, SampledRow

__all__ = ["Choice", "Chosen", "ChunkResult", "RowFailed", "SampledRow", "SequenceChunk", "StepResult"]


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """New tokens of one context, from absolute position `start`.

    `block_ids` covers positions 0 … start + len(token_ids) - 1 at least; positions before `start` are already in the pool. Each
    row of `samples` draws a token from the logits after the last position: none inside a prompt, one per sequence at its
    end. `scored_ids` are prompt tokens to be scored: the i-th is the one after position `start + i`, with `num_top` alternatives.
    """

    token_ids: tuple[int, ...]
    start: int
    block_ids: Sequence[int]
    samples: tuple[SampledRow, ...] = ()
    scored_ids: tuple[int, ...] = ()
    num_top: int = 0


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What one chunk got: a choice per row of `samples`, a score per id of `scored_ids`."""

    choices: tuple[Choice, ...] = ()
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per chunk of the step, in order."""

    chunks: tuple[ChunkResult, ...]
