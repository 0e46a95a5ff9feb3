"""One sequence on a decode node, from submit to release."""

from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.layout import num_blocks_for
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import SampledToken, Work
from pdserve.engine.blocks import BlockLease


class SequenceState(Enum):
    """Where a sequence stands."""

    EXPECTED = "expected"
    """Submitted; its prefill node has not asked for blocks."""
    WAITING = "waiting"
    """The prefill node asked; no blocks were promised yet."""
    RECEIVING = "receiving"
    """Blocks are promised; KV is on its way."""
    READY = "ready"
    """All KV is verified and placed; no place in the batch yet."""
    RUNNING = "running"
    """In the batch."""
    CLOSING = "closing"
    """Ended; a step or the corridor may still touch its blocks."""
    OVER = "over"
    """Nothing is left of it."""


class SequenceEvent(Enum):
    """What happens to a sequence."""

    OPEN = "open"
    GRANT = "grant"
    ADOPT = "adopt"
    RUN = "run"
    END = "end"
    LET_GO = "let go"


_S, _E = SequenceState, SequenceEvent

SEQUENCE_TABLE = TransitionTable(
    name="decode sequence",
    initial=_S.EXPECTED,
    terminal=frozenset({_S.OVER}),
    moves={
        (_S.EXPECTED, _E.OPEN): _S.WAITING,
        (_S.WAITING, _E.GRANT): _S.RECEIVING,
        (_S.RECEIVING, _E.ADOPT): _S.READY,
        (_S.READY, _E.RUN): _S.RUNNING,
        **{(s, _E.END): _S.CLOSING for s in (_S.EXPECTED, _S.WAITING, _S.RECEIVING, _S.READY, _S.RUNNING)},
        (_S.CLOSING, _E.LET_GO): _S.OVER,
    },
    ignored=frozenset(
        {
            *(
                (s, _E.OPEN) for s in (_S.WAITING, _S.RECEIVING, _S.READY, _S.RUNNING, _S.CLOSING)
            ),  # told twice, or late
            (_S.CLOSING, _E.ADOPT),  # the last frame crossed the end
            (_S.CLOSING, _E.END),  # ended twice: the first cause counts
        }
    ),
)


@dataclass(slots=True, eq=False)
class Sequence:
    """Live state of one sequence. Owned by the scheduler.

    `last_token` is the newest token, whose KV is not in the pool yet; `num_cached` positions before it are.
    """

    work: Work
    submitted_s: float
    life: LifeCycle[SequenceState, SequenceEvent]
    lease: BlockLease | None = None
    last_token: SampledToken | None = None
    num_cached: int = 0
    adopted_s: float = 0.0
    in_step: bool = False
    transfer_open: bool = True
    is_held: bool = False
    is_stalled: bool = False
    durations_s: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> SequenceState:
        """Where it stands."""
        return self.life.state

    @property
    def next_index(self) -> int:
        """Absolute output index of the next token."""
        assert self.last_token is not None, "an adopted sequence has its first token"
        return self.last_token.index + 1

    @property
    def is_adopted(self) -> bool:
        """Whether all of its KV is here."""
        return self.state in (SequenceState.READY, SequenceState.RUNNING)

    @property
    def is_untouched(self) -> bool:
        """Whether neither a step nor the corridor can touch its blocks any more."""
        return not self.in_step and not self.transfer_open

    def num_blocks_to_receive(self, block_size: int) -> int:
        """Return the blocks for the context and the first token, so that the first step always has room."""
        return num_blocks_for(self.work.context_len + 1, block_size)
