"""One leg on a decode node, from submit to release: one transfer, one context in blocks, and the sequences that continue it."""

from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.layout import num_blocks_for
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import SampledToken, Work
from pdserve.decode_node.sequence import SEQUENCE_TABLE, Sequence, SequenceState
from pdserve.engine.blocks import BlockLease


class LegStage(Enum):
    """Where a leg stands."""

    EXPECTED = "expected"
    """Submitted; its prefill node has not asked for blocks."""
    WAITING = "waiting"
    """The prefill node asked; no blocks were promised yet."""
    RECEIVING = "receiving"
    """Blocks are promised; KV is on its way."""
    ADOPTED = "adopted"
    """All KV is verified and placed; its sequences have lives of their own."""
    CLOSING = "closing"
    """Ended; a step or the corridor may still touch its blocks."""
    OVER = "over"
    """Nothing is left of it."""


class LegEvent(Enum):
    """What happens to a leg."""

    OPEN = "open"
    GRANT = "grant"
    ADOPT = "adopt"
    END = "end"
    LET_GO = "let go"


_S, _E = LegStage, LegEvent

DECODE_LEG_TABLE = TransitionTable(
    name="decode leg",
    initial=_S.EXPECTED,
    terminal=frozenset({_S.OVER}),
    moves={
        (_S.EXPECTED, _E.OPEN): _S.WAITING,
        (_S.WAITING, _E.GRANT): _S.RECEIVING,
        (_S.RECEIVING, _E.ADOPT): _S.ADOPTED,
        **{(s, _E.END): _S.CLOSING for s in (_S.EXPECTED, _S.WAITING, _S.RECEIVING, _S.ADOPTED)},
        (_S.CLOSING, _E.LET_GO): _S.OVER,
    },
    ignored=frozenset(
        {
            *((s, _E.OPEN) for s in (_S.WAITING, _S.RECEIVING, _S.ADOPTED, _S.CLOSING)),  # told twice, or late
            (_S.CLOSING, _E.ADOPT),  # the last frame crossed the end
            (_S.CLOSING, _E.END),  # ended twice: the first cause counts
        }
    ),
)


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """Live state of one leg. Owned by the scheduler.

    `lease` holds the blocks of the transfer until the corridor is done with them: the context's full blocks, then one block per
    sequence, of which the first takes the rest of the context's KV. With the adoption the sequences share them out.
    """

    work: Work
    life: LifeCycle[LegStage, LegEvent]
    awaits_constraint: bool
    lease: BlockLease | None = None
    sequences: list[Sequence] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    has_finished: bool = False
    transfer_open: bool = True
    adopted_s: float = 0.0
    durations_s: dict[str, float] = field(default_factory=dict)

    @property
    def stage(self) -> LegStage:
        """Where it stands."""
        return self.life.state

    @property
    def is_untouched(self) -> bool:
        """Whether neither a step nor the corridor can touch its blocks any more."""
        return not self.transfer_open and not any(sequence.in_step for sequence in self.sequences)

    @property
    def live_sequences(self) -> list[Sequence]:
        """The adopted sequences of which more tokens are to come."""
        return [sequence for sequence in self.sequences if sequence.is_live]

    @property
    def num_growing(self) -> int:
        """Sequences that will take more blocks: those that run, or that are expected to."""
        if self.stage in (LegStage.ADOPTED, LegStage.CLOSING):
            return len(self.live_sequences)
        return self.work.num_sequences - len(self.cancelled)

    @property
    def block_ids(self) -> set[int]:
        """Every block that the leg or one of its sequences holds."""
        leases = [self.lease, *(lease for sequence in self.sequences for lease in (sequence.lease, sequence.source))]
        return {block for lease in leases if lease is not None for block in lease.block_ids}

    def num_blocks_to_receive(self, block_size: int) -> int:
        """Return the blocks for the context, and for each sequence's first token, so that its first step always has room."""
        return self.work.context_len // block_size + self.num_growing

    def share_out(self, tokens: list[SampledToken], block_size: int, now_s: float) -> None:
        """Make a sequence for each of the first `tokens`: context blocks are shared, each has its own next block."""
        assert self.lease is not None, "KV was placed into blocks"
        num_full = self.work.context_len // block_size
        full, own = self.lease.block_ids[:num_full], self.lease.block_ids[num_full:]
        has_rest = self.work.context_len % block_size > 0
        for place, token in enumerate(tokens):
            owner = f"{self.work.leg}.{token.sequence}"
            self.sequences.append(
                Sequence(
                    work=self.work,
                    index=token.sequence,
                    life=LifeCycle(SEQUENCE_TABLE, owner, now_s),
                    lease=self.lease.fork([*full, own[place]], owner),
                    source=self.lease.fork(own[:1], owner) if has_rest and place > 0 else None,
                    last_token=token,
                    num_cached=self.work.context_len,
                )
            )

    def forget_over(self) -> None:
        """Drop the sequences of which nothing is left, and with them what hangs on them."""
        self.sequences = [sequence for sequence in self.sequences if sequence.state is not SequenceState.OVER]

    def release_lease(self) -> None:
        """Give up the transfer's hold of the blocks; the sequences keep theirs."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


def num_blocks_at_most(work: Work, block_size: int) -> int:
    """Return the blocks that a leg takes if all of its sequences get as long as they may."""
    num_full = work.context_len // block_size
    return num_full + work.num_sequences * (num_blocks_for(work.max_len, block_size) - num_full)


def fault_of_first_tokens(work: Work, tokens: tuple[SampledToken, ...]) -> str:
    """Return what is wrong with the first tokens of a COMMIT; empty if they are one of each of some sequences of the leg."""
    named = [token.sequence for token in tokens]
    if not named or len(set(named)) != len(named) or not set(named) <= set(work.sequences):
        return f"first tokens of sequences {named}, expected of {list(work.sequences)}"
    wrong = [token.index for token in tokens if token.index != work.next_index]
    return f"first tokens at output index {wrong}, expected {work.next_index}" if wrong else ""
