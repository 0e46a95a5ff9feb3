"""Who gets blocks, who runs in the next step, who is evicted, and what each event means. Pure: no clock, tensor or socket.

Blocks are promised by original age; a smaller transfer may overtake a waiting one for at most `overtake_s`. A sequence
takes blocks as it grows; when none is left, the youngest that holds any is evicted (the router resumes it). The oldest never is.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from pdserve.core.hold import Hold, HoldStage
from pdserve.core.ids import LegKey, TransferId
from pdserve.core.layout import num_blocks_for
from pdserve.core.lifecycle import LifeCycle
from pdserve.core.work import LegOutcome, SampledToken, Work
from pdserve.decode_node.sequence import SEQUENCE_TABLE, Sequence, SequenceEvent, SequenceState
from pdserve.engine.batch import Chosen, ChunkResult, RowFailed
from pdserve.engine.blocks import BlockLease, BlockPool
from pdserve.node.reports import LegReport, ReportEnd, ReportRelease


@dataclass(frozen=True, slots=True)
class ExpectTransfer:
    """Let the corridor accept this transfer: a router's submit created it."""

    work: Work


@dataclass(frozen=True, slots=True)
class GrantTransfer:
    """Promise blocks to a transfer: bind them, tell the prefill node, tell the router."""

    leg: LegKey
    transfer_id: TransferId
    lease: BlockLease
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Give a transfer up, `is_busy` if that is nobody's failure; the corridor answers with its last event."""

    transfer_id: TransferId
    reason: str
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class ReportAdopted:
    """Tell the router that all KV is here, with the first tokens again."""

    leg: LegKey
    tokens: tuple[SampledToken, ...]
    durations_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class ReportToken:
    """Tell the router a new token."""

    leg: LegKey
    token: SampledToken


Instruction = ExpectTransfer | GrantTransfer | CancelTransfer | ReportAdopted | ReportToken | LegReport


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the sequences that get one token each."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Bounds of scheduling; see `DecodeSettings`."""

    max_batch: int
    max_model_len: int
    block_size: int
    growth_blocks: int
    reserve_on_submit: bool = False
    overtake_s: float = 2.0


class DecodeScheduler:
    """All sequences of a decode node. Every method returns what to do; nothing is done here but the books."""

    def __init__(
        self, limits: DecodeLimits, pool: BlockPool, eos_token_ids: frozenset[int], hold: Hold | None = None
    ) -> None:
        self._limits, self._pool, self._eos, self._hold = limits, pool, eos_token_ids, hold
        self._sequences: dict[LegKey, Sequence] = {}
        self._by_transfer: dict[TransferId, Sequence] = {}
        self.num_evicted = 0

    def submit(self, work: Work, now_s: float) -> list[Instruction]:
        """Expect a transfer, or refuse a sequence that can never fit."""
        fault = self._never_fits(work)
        if work.transfer_id in self._by_transfer:
            return [ReportEnd(work.leg, LegOutcome.REFUSED, "transfer_id_in_use"), ReportRelease(work.leg, {})]
        if fault or work.transfer_id is None:
            reason = "never_fits" if fault else "no_transfer"
            return [ReportEnd(work.leg, LegOutcome.REFUSED, reason, fault), ReportRelease(work.leg, {})]
        sequence = Sequence(work, now_s, LifeCycle(SEQUENCE_TABLE, str(work.leg), now_s))
        self._sequences[work.leg] = sequence
        self._by_transfer[work.transfer_id] = sequence
        if self._limits.reserve_on_submit:
            self._reserve(sequence)
        return [ExpectTransfer(work)]

    def opened(self, transfer_id: TransferId, now_s: float) -> list[Instruction]:
        """The prefill node asks for blocks."""
        sequence = self._by_transfer.get(transfer_id)
        if sequence is None:
            return []
        sequence.life.advance(SequenceEvent.OPEN, now_s)
        return self.grant_waiting(now_s)

    def received(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        grant_wait_s: float,
        place_s: float,
        now_s: float,
    ) -> list[Instruction]:
        """All KV is verified and placed: adopt the sequence."""
        sequence = self._by_transfer.get(transfer_id)
        if sequence is None or not sequence.life.advance(SequenceEvent.ADOPT, now_s):
            return []
        assert sequence.lease is not None, "KV was placed into blocks"
        sequence.lease.adopt()
        work = sequence.work
        first = tokens[0]
        sequence.last_token, sequence.num_cached, sequence.adopted_s = first, work.context_len, now_s
        sequence.durations_s |= {"decode.reserve_wait": grant_wait_s, "decode.place": place_s}
        adopted = ReportAdopted(work.leg, tokens, dict(sequence.durations_s))
        reason = work.finish_reason(first.token_id, first.index, self._eos)
        if reason is None:
            return [adopted]
        # A correct prefill node aborts such a transfer; never run a step past the end, whoever is at fault.
        return [adopted, *self._end(sequence, LegOutcome.FINISHED, "finished", "", now_s)]

    def finished_early(self, transfer_id: TransferId, now_s: float) -> list[Instruction]:
        """The sequence ended at its first token; nothing is adopted."""
        sequence = self._by_transfer.get(transfer_id)
        if sequence is None:
            return []
        return self._end(sequence, LegOutcome.FINISHED, "finished_at_first_token", "", now_s)

    def transfer_failed(
        self, transfer_id: TransferId, reason: str, detail: str, *, busy: bool, now_s: float
    ) -> list[Instruction]:
        """The corridor gave the transfer up."""
        sequence = self._by_transfer.get(transfer_id)
        if sequence is None:
            return []
        return self._end(sequence, LegOutcome.BUSY if busy else LegOutcome.FAILED, reason, detail, now_s)

    def transfer_closed(self, transfer_id: TransferId, now_s: float) -> list[Instruction]:
        """The corridor will not touch the blocks again. The last event of every expected transfer."""
        sequence = self._by_transfer.get(transfer_id)
        if sequence is None:
            return []
        sequence.transfer_open = False
        instructions: list[Instruction] = []
        if not sequence.is_adopted:
            instructions = self._end(sequence, LegOutcome.FAILED, "transfer_closed", "closed without KV", now_s)
        return instructions + self._let_go(sequence, now_s)

    def cancel(self, leg: LegKey, outcome: LegOutcome, reason: str, now_s: float) -> list[Instruction]:
        """End a sequence at whatever stage it is."""
        sequence = self._sequences.get(leg)
        return [] if sequence is None else self._end(sequence, outcome, reason, "", now_s)

    def cancel_sequences(self, leg: LegKey, sequences: frozenset[int], reason: str, now_s: float) -> list[Instruction]:
        """End some sequences of a leg."""
        sequence = self._sequences.get(leg)
        if sequence is None or not set(sequence.work.sequences) <= sequences:
            return []
        return self._end(sequence, LegOutcome.CANCELLED, reason, "", now_s)

    def expire(self, now_s: float) -> list[Instruction]:
        """End sequences whose client's deadline passed, and look again for blocks for those that wait."""
        late = [s for s in self._sequences.values() if s.work.deadline_s is not None and now_s > s.work.deadline_s]
        ended = [step for s in late for step in self._end(s, LegOutcome.CANCELLED, "deadline", "", now_s)]
        return ended + self.grant_waiting(now_s)

    def grant_waiting(self, now_s: float) -> list[Instruction]:
        """Promise blocks to those that wait, oldest first."""
        instructions: list[Instruction] = []
        for sequence in self._in_order(SequenceState.WAITING):
            if not self._reserve(sequence):
                if now_s - sequence.life.entered_s > self._limits.overtake_s:
                    break
                continue
            sequence.life.advance(SequenceEvent.GRANT, now_s)
            assert sequence.lease is not None
            assert sequence.work.transfer_id is not None
            instructions.append(GrantTransfer(sequence.work.leg, sequence.work.transfer_id, sequence.lease))
        return instructions

    def plan(self, now_s: float) -> tuple[StepPlan | None, list[Instruction]]:
        """Return the next step, or None if nothing can run, and what to do before it."""
        self._admit(now_s)
        instructions: list[Instruction] = []
        for sequence in self._in_order(SequenceState.RUNNING):
            if sequence.state is SequenceState.RUNNING:
                instructions += self._make_room(sequence, now_s)
        runnable = [
            sequence
            for sequence in self._in_order(SequenceState.RUNNING)
            if not sequence.is_stalled and not self._holds(sequence)
        ]
        instructions += self.grant_waiting(now_s)
        if not runnable:
            return None, instructions
        for sequence in runnable:
            sequence.in_step = True
            sequence.durations_s.setdefault("decode.queue", now_s - sequence.adopted_s)
        return StepPlan(tuple(runnable)), instructions

    def step_done(self, plan: StepPlan, results: Seq[ChunkResult], compute_s: float, now_s: float) -> list[Instruction]:
        """Take a step's results: what each sequence of the plan got."""
        instructions: list[Instruction] = []
        for sequence, result in zip(plan.sequences, results, strict=True):
            sequence.in_step = False
            durations = sequence.durations_s
            durations["decode.compute"] = durations.get("decode.compute", 0.0) + compute_s
            if sequence.state is SequenceState.CLOSING:
                instructions += self._let_go(sequence, now_s)
                continue
            choice = result.choices[0]
            if isinstance(choice, RowFailed):
                instructions += self._end(sequence, LegOutcome.FAILED, "no_token", choice.reason, now_s)
                continue
            instructions += self._take_token(sequence, choice, now_s)
        return instructions

    def step_failed(self, plan: StepPlan, detail: str, now_s: float) -> list[Instruction]:
        """End the sequences of a step that raised."""
        instructions: list[Instruction] = []
        for sequence in plan.sequences:
            sequence.in_step = False
            instructions += self._end(sequence, LegOutcome.FAILED, "engine_error", detail, now_s)
            instructions += self._let_go(sequence, now_s)
        return instructions

    def count(self, *states: SequenceState) -> int:
        """Return the number of sequences in any of `states`."""
        return sum(sequence.state in states for sequence in self._sequences.values())

    @property
    def num_held(self) -> int:
        """Sequences that stand at the test hook."""
        return sum(sequence.is_held for sequence in self._sequences.values())

    @property
    def num_stalled(self) -> int:
        """Running sequences that wait for a block."""
        return sum(sequence.is_stalled for sequence in self._sequences.values())

    def describe(self, now_s: float) -> list[dict[str, object]]:
        """Return every sequence's state and age."""
        return [
            {
                "leg": str(leg),
                "state": sequence.state.value,
                "age_s": round(sequence.life.age_s(now_s), 3),
                "cached": sequence.num_cached,
            }
            for leg, sequence in self._sequences.items()
        ]

    def check_invariants(self) -> None:
        """Raise InternalError or AssertionError if the books do not agree."""
        self._pool.check_invariants()
        assert len(self._sequences) == len(self._by_transfer), "a transfer belongs to one sequence"
        leased = 0
        for sequence in self._sequences.values():
            assert sequence.state is not SequenceState.OVER, f"{sequence.work.leg} is over but on the books"
            assert not sequence.is_adopted or sequence.lease is not None, f"{sequence.work.leg} runs without blocks"
            leased += 0 if sequence.lease is None else len(sequence.lease.block_ids)
        assert leased == self._pool.num_blocks - self._pool.num_free, "blocks are leased to nobody"

    def _never_fits(self, work: Work) -> str:
        if work.max_len > self._limits.max_model_len:
            return f"{work.max_len} tokens exceed the model length of {self._limits.max_model_len}"
        capacity = self._pool.num_blocks * self._limits.block_size
        return "" if work.max_len <= capacity else f"{work.max_len} tokens exceed the pool of {capacity} tokens"

    def _in_order(self, *states: SequenceState) -> list[Sequence]:
        chosen = (sequence for sequence in self._sequences.values() if sequence.state in states)
        return sorted(chosen, key=lambda sequence: sequence.work.arrived_s)

    def _reserve(self, sequence: Sequence) -> bool:
        if sequence.lease is not None:
            return True
        needed = sequence.num_blocks_to_receive(self._limits.block_size)
        others = sum(other.lease is not None for other in self._sequences.values())
        if needed + self._limits.growth_blocks * others > self._pool.num_free:
            return False
        sequence.lease = self._pool.try_lease(needed, str(sequence.work.leg), reserved=True)
        return sequence.lease is not None

    def _admit(self, now_s: float) -> None:
        room = self._limits.max_batch - self.count(SequenceState.RUNNING)
        for sequence in self._in_order(SequenceState.READY)[: max(0, room)]:
            sequence.life.advance(SequenceEvent.RUN, now_s)

    def _make_room(self, sequence: Sequence, now_s: float) -> list[Instruction]:
        """Give a running sequence the block that its next token needs, at the cost of the youngest if must be."""
        assert sequence.lease is not None
        needed = num_blocks_for(sequence.num_cached + 1, self._limits.block_size) - len(sequence.lease.block_ids)
        instructions: list[Instruction] = []
        while needed > self._pool.num_free and not self._blocks_on_their_way() and not sequence.is_stalled:
            victim = self._youngest()
            if victim is None:
                break
            self.num_evicted += 1
            instructions += self._end(victim, LegOutcome.EVICTED, "out_of_blocks", "the youngest gives way", now_s)
            if victim is sequence:
                return instructions
        sequence.is_stalled = needed > self._pool.num_free
        if not sequence.is_stalled and needed > 0:
            sequence.lease.extend(needed)
        return instructions

    def _blocks_on_their_way(self) -> bool:
        return any(s.state is SequenceState.CLOSING and s.lease is not None for s in self._sequences.values())

    def _youngest(self) -> Sequence | None:
        holders = [s for s in self._sequences.values() if s.lease is not None and s.state is not SequenceState.CLOSING]
        holders.sort(key=lambda sequence: sequence.work.arrived_s)
        return holders[-1] if len(holders) > 1 else None

    def _take_token(self, sequence: Sequence, choice: Chosen, now_s: float) -> list[Instruction]:
        index = sequence.next_index
        reason = sequence.work.finish_reason(choice.token_id, index, self._eos)
        token = SampledToken(index, choice.token_id, choice.logprob, reason)
        sequence.last_token = token
        sequence.num_cached += 1
        report = ReportToken(sequence.work.leg, token)
        if token.finish_reason is None:
            return [report]
        return [report, *self._end(sequence, LegOutcome.FINISHED, "finished", "", now_s)]

    def _end(
        self, sequence: Sequence, outcome: LegOutcome, reason: str, detail: str, now_s: float
    ) -> list[Instruction]:
        if sequence.state is SequenceState.OVER or not sequence.life.advance(SequenceEvent.END, now_s):
            return []
        sequence.is_held = sequence.is_stalled = False
        instructions: list[Instruction] = [ReportEnd(sequence.work.leg, outcome, reason, detail)]
        if sequence.transfer_open and sequence.work.transfer_id is not None:
            is_busy = outcome in (LegOutcome.EVICTED, LegOutcome.DRAINED)
            instructions.append(CancelTransfer(sequence.work.transfer_id, reason, is_busy))
        return instructions + self._let_go(sequence, now_s)

    def _let_go(self, sequence: Sequence, now_s: float) -> list[Instruction]:
        if sequence.state is not SequenceState.CLOSING or not sequence.is_untouched:
            return []
        sequence.life.advance(SequenceEvent.LET_GO, now_s)
        if sequence.lease is not None:
            sequence.lease.release()
        work = sequence.work
        del self._sequences[work.leg]
        assert work.transfer_id is not None
        del self._by_transfer[work.transfer_id]
        return [ReportRelease(work.leg, sequence.durations_s)]

    def _holds(self, sequence: Sequence) -> bool:
        sequence.is_held = self._hold is not None and self._hold.at(HoldStage.DECODING, sequence.next_index)
        return sequence.is_held
