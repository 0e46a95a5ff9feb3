"""One sequence on a decode node, from its leg's adoption until its last token."""

from dataclasses import dataclass
from enum import Enum

from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import SampledToken, Work
from pdserve.engine.blocks import BlockLease


class SequenceState(Enum):
    """Where a sequence stands."""

    READY = "ready"
    """Its first token is here, and the KV of its context; no place in the batch yet."""
    RUNNING = "running"
    """In the batch."""
    CLOSING = "closing"
    """Ended; a step may still touch its blocks."""
    OVER = "over"
    """Nothing is left of it."""


class SequenceEvent(Enum):
    """What happens to a sequence."""

    RUN = "run"
    END = "end"
    LET_GO = "let go"


_S, _E = SequenceState, SequenceEvent

SEQUENCE_TABLE = TransitionTable(
    name="decode sequence",
    initial=_S.READY,
    terminal=frozenset({_S.OVER}),
    moves={
        (_S.READY, _E.RUN): _S.RUNNING,
        (_S.READY, _E.END): _S.CLOSING,
        (_S.RUNNING, _E.END): _S.CLOSING,
        (_S.CLOSING, _E.LET_GO): _S.OVER,
    },
    ignored=frozenset({(_S.CLOSING, _E.END)}),  # ended twice: the first cause counts
)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Live state of one sequence. Owned by the scheduler.

    `lease` starts with the full blocks of the context, shared with the leg's other sequences, then the sequence's own. `source`,
    until its first step, is the block that holds the rest of the context's KV, if another sequence has that for its own: it is
    copied before this one writes. `last_token` is the newest token, whose KV is not in the pool yet; `num_cached` positions
    before it are.
    """

    work: Work
    index: int
    life: LifeCycle[SequenceState, SequenceEvent]
    lease: BlockLease
    source: BlockLease | None
    last_token: SampledToken
    num_cached: int
    in_step: bool = False
    is_held: bool = False
    is_stalled: bool = False

    @property
    def state(self) -> SequenceState:
        """Where it stands."""
        return self.life.state

    @property
    def is_live(self) -> bool:
        """Whether more tokens are to come."""
        return self.state in (SequenceState.READY, SequenceState.RUNNING)

    @property
    def next_index(self) -> int:
        """Absolute output index of the next token."""
        return self.last_token.index + 1

    def drop_source(self) -> None:
        """Let go of the block that was to be copied: it was, or will not be."""
        if self.source is not None:
            self.source.release()
            self.source = None

    def end(self, now_s: float) -> None:
        """Let no more tokens come; its blocks go at once, or after the step that touches them (`let_go`)."""
        self.life.advance(SequenceEvent.END, now_s)
        self.is_held = self.is_stalled = False
        if not self.in_step and self.state is SequenceState.CLOSING:
            self.let_go(now_s)

    def let_go(self, now_s: float) -> None:
        """Give the blocks back: no step touches them any more."""
        self.life.advance(SequenceEvent.LET_GO, now_s)
        self.drop_source()
        self.lease.release()
