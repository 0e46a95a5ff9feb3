"""What the prefill scheduler asks for: the desk carries it to engine, corridor and router."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.core.ids import LegKey, TransferId
from pdserve.core.work import SampledToken, TokenScore, Work
from pdserve.engine.blocks import BlockLease
from pdserve.node.reports import LegReport
from pdserve.prefill_node.job import Job


@dataclass(frozen=True, slots=True)
class OpenTransfer:
    """Ask the decode node for blocks."""

    work: Work


@dataclass(frozen=True, slots=True)
class BindBlocks:
    """The blocks of a transfer are known: the corridor may pack from them until `SendClosed`."""

    transfer_id: TransferId
    lease: BlockLease


@dataclass(frozen=True, slots=True)
class CommitTransfer:
    """All KV is computed: send COMMIT after it, with the first token of each sequence that is not cancelled."""

    transfer_id: TransferId
    tokens: tuple[SampledToken, ...]
    durations_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AbortTransfer:
    """Give a transfer up; `finished` if every sequence ended at its first token, `is_busy` if that is nobody's failure."""

    transfer_id: TransferId
    reason: str
    finished: bool = False
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class ReportPromptScores:
    """Tell the router what the model thought of prompt tokens, the first of them at position `start`."""

    leg: LegKey
    start: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class ReportFirstToken:
    """Tell the router the first token of each sequence that is not cancelled."""

    leg: LegKey
    tokens: tuple[SampledToken, ...]
    durations_s: Mapping[str, float]


Instruction = (
    OpenTransfer | BindBlocks | CommitTransfer | AbortTransfer | ReportPromptScores | ReportFirstToken | LegReport
)


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Positions of one prompt that a step computes.

    `sequences` get their first token from the last of them: none inside a context. `scored` are the prompt positions whose
    tokens are scored; they lie one behind `tokens`.
    """

    job: Job
    tokens: range
    sequences: tuple[int, ...] = ()
    scored: range = range(0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: at most one chunk per prompt."""

    chunks: tuple[PlannedChunk, ...]
