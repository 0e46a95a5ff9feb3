"""One prompt on a prefill node, from submit to release."""

from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.layout import num_blocks_for
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import LegOutcome, SampledToken, Work
from pdserve.engine.blocks import BlockLease


class JobState(Enum):
    """Where a prompt stands."""

    WAITING = "waiting"
    """Submitted; its decode node was not asked for blocks yet."""
    OPENING = "opening"
    """Asked; no grant yet."""
    GRANTED = "granted"
    """May start as soon as this pool has blocks for the whole prompt."""
    RUNNING = "running"
    """Holds blocks; chunks are being computed."""
    HANDING_OVER = "handing_over"
    """First token sampled; KV on its way; no ACK yet."""
    CLOSING = "closing"
    """Ended; a step or the corridor may still touch its blocks."""
    OVER = "over"
    """Nothing is left of it."""


class JobEvent(Enum):
    """What happens to a prompt."""

    OPEN = "open"
    GRANT = "grant"
    START = "start"
    SAMPLED = "sampled"
    END = "end"
    LET_GO = "let go"


_ENDABLE = (JobState.WAITING, JobState.OPENING, JobState.GRANTED, JobState.RUNNING, JobState.HANDING_OVER)

JOB_TABLE = TransitionTable(
    name="prefill job",
    initial=JobState.WAITING,
    terminal=frozenset({JobState.OVER}),
    moves={
        (JobState.WAITING, JobEvent.OPEN): JobState.OPENING,
        (JobState.WAITING, JobEvent.GRANT): JobState.GRANTED,  # nothing is handed over: no grant is needed
        (JobState.OPENING, JobEvent.GRANT): JobState.GRANTED,
        (JobState.GRANTED, JobEvent.START): JobState.RUNNING,
        (JobState.RUNNING, JobEvent.SAMPLED): JobState.HANDING_OVER,
        **{(state, JobEvent.END): JobState.CLOSING for state in _ENDABLE},
        (JobState.CLOSING, JobEvent.LET_GO): JobState.OVER,
    },
    ignored=frozenset(
        {
            (JobState.GRANTED, JobEvent.GRANT),  # a grant told twice
            (JobState.RUNNING, JobEvent.GRANT),
            (JobState.HANDING_OVER, JobEvent.GRANT),
            (JobState.CLOSING, JobEvent.GRANT),  # a grant that crossed the end
            (JobState.CLOSING, JobEvent.SAMPLED),  # the step was under way when the prompt ended
            (JobState.CLOSING, JobEvent.END),  # ended twice: the first cause counts
        }
    ),
)


@dataclass(slots=True, eq=False)
class Job:
    """Live state of one prompt. Owned by the scheduler.

    `cancelled` are the sequences that the router ended by themselves; `awaits_constraint` stops the prompt before its last token.
    """

    work: Work
    submitted_s: float
    life: LifeCycle[JobState, JobEvent]
    lease: BlockLease | None = None
    num_computed: int = 0
    num_chunks: int = 0
    started_s: float | None = None
    compute_s: float = 0.0
    in_step: bool = False
    transfer_open: bool = False
    is_held: bool = False
    awaits_constraint: bool = False
    cancelled: set[int] = field(default_factory=set)
    first_tokens: tuple[SampledToken, ...] = ()
    outcome: LegOutcome | None = None
    durations_s: dict[str, float] = field(default_factory=dict)
    kv_bytes: int = 0
    kv_frames: int = 0

    @property
    def state(self) -> JobState:
        """Where it stands."""
        return self.life.state

    @property
    def num_left(self) -> int:
        """Context tokens still to be computed."""
        return self.work.context_len - self.num_computed

    @property
    def live_sequences(self) -> tuple[int, ...]:
        """Indexes of the sequences that go on: not cancelled, and not ended at their first token."""
        over = self.cancelled | {token.sequence for token in self.first_tokens if token.finish_reason is not None}
        return tuple(sequence for sequence in self.work.sequences if sequence not in over)

    @property
    def is_untouched(self) -> bool:
        """Whether neither a step nor the corridor can touch its blocks any more."""
        return not self.in_step and not self.transfer_open

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks that its whole context takes."""
        return num_blocks_for(self.work.context_len, block_size)
