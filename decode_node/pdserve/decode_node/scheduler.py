"""Who gets blocks, who runs in the next step, who is evicted, and what each event means. Pure: no clock, tensor or socket.

Blocks are promised by original age; a smaller transfer may overtake a waiting one for at most `overtake_s`. A sequence takes
blocks as it grows; when none is left, the youngest leg that holds any is evicted with all of its sequences (the router resumes
each of them as a leg of its own). The oldest never is. A leg with several sequences is one transfer and one reservation; the
sequences share the context's full blocks, and each copies the last, partial one before it first writes.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from pdserve.core.hold import Hold, HoldStage
from pdserve.core.ids import LegKey, TransferId
from pdserve.core.layout import num_blocks_for
from pdserve.core.lifecycle import LifeCycle
from pdserve.core.work import LegOutcome, SampledToken, Work
from pdserve.decode_node.instructions import (
    BlockCopy,
    CancelTransfer,
    ExpectTransfer,
    GrantTransfer,
    Instruction,
    ReportAdopted,
    ReportToken,
    StepPlan,
)
from pdserve.decode_node.leg import (
    DECODE_LEG_TABLE,
    DecodeLeg,
    LegEvent,
    LegStage,
    fault_of_first_tokens,
)
from pdserve.decode_node.limits import DecodeLimits
from pdserve.decode_node.sequence import Sequence, SequenceEvent, SequenceState
from pdserve.engine.batch import Chosen, ChunkResult, RowFailed
from pdserve.engine.blocks import BlockPool
from pdserve.node.reports import ReportEnd, ReportRelease


class DecodeScheduler:
    """All legs of a decode node. Every method returns what to do; nothing is done here but the books."""

    def __init__(
        self, limits: DecodeLimits, pool: BlockPool, eos_token_ids: frozenset[int], hold: Hold | None = None
    ) -> None:
        self._limits, self._pool, self._eos, self._hold = limits, pool, eos_token_ids, hold
        self._legs: dict[LegKey, DecodeLeg] = {}
        self._by_transfer: dict[TransferId, DecodeLeg] = {}
        self.num_evicted = 0
        self.num_copied = 0

    def submit(self, work: Work, now_s: float) -> list[Instruction]:
        """Expect a transfer, or refuse a leg that can never fit."""
        fault = self._limits.never_fits(work, self._pool.num_blocks)
        if work.transfer_id in self._by_transfer:
            return [ReportEnd(work.leg, LegOutcome.REFUSED, "transfer_id_in_use"), ReportRelease(work.leg, {})]
        if fault or work.transfer_id is None:
            reason = "never_fits" if fault else "no_transfer"
            return [ReportEnd(work.leg, LegOutcome.REFUSED, reason, fault), ReportRelease(work.leg, {})]
        life = LifeCycle(DECODE_LEG_TABLE, str(work.leg), now_s)
        leg = DecodeLeg(work, life, awaits_constraint=work.sampling.grammar is not None)
        self._legs[work.leg] = leg
        self._by_transfer[work.transfer_id] = leg
        if self._limits.reserve_on_submit:
            self._reserve(leg)
        return [ExpectTransfer(work)]

    def opened(self, transfer_id: TransferId, now_s: float) -> list[Instruction]:
        """The prefill node asks for blocks."""
        leg = self._by_transfer.get(transfer_id)
        if leg is None:
            return []
        leg.life.advance(LegEvent.OPEN, now_s)
        return self.grant_waiting(now_s)

    def received(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        grant_wait_s: float,
        place_s: float,
        now_s: float,
    ) -> list[Instruction]:
        """All KV is verified and placed: adopt the leg. `tokens` are the first of each sequence that was not cancelled."""
        leg = self._by_transfer.get(transfer_id)
        if leg is None:
            return []
        fault = fault_of_first_tokens(leg.work, tokens)
        if fault:
            return self._end(leg, LegOutcome.FAILED, "bad_first_tokens", fault, now_s)
        if not leg.life.advance(LegEvent.ADOPT, now_s):
            return []
        assert leg.lease is not None, "KV was placed into blocks"
        leg.lease.adopt()
        leg.adopted_s = now_s
        leg.durations_s |= {"decode.reserve_wait": grant_wait_s, "decode.place": place_s}
        # COMMIT marks those that ended; still never run a step past an end, whoever is at fault.
        going_on = [token for token in tokens if self._goes_on(leg.work, token)]
        leg.has_finished = len(going_on) < len(tokens)
        live = [token for token in going_on if token.sequence not in leg.cancelled]
        leg.share_out(live, self._limits.block_size, now_s)
        return [ReportAdopted(leg.work.leg, tokens, dict(leg.durations_s)), *self._end_if_empty(leg, "finished", now_s)]

    def finished_early(self, transfer_id: TransferId, now_s: float) -> list[Instruction]:
        """Every sequence ended at its first token; nothing is adopted."""
        leg = self._by_transfer.get(transfer_id)
        return [] if leg is None else self._end(leg, LegOutcome.FINISHED, "finished_at_first_token", "", now_s)

    def transfer_failed(
        self, transfer_id: TransferId, reason: str, detail: str, *, busy: bool, now_s: float
    ) -> list[Instruction]:
        """The corridor gave the transfer up."""
        leg = self._by_transfer.get(transfer_id)
        if leg is None:
            return []
        return self._end(leg, LegOutcome.BUSY if busy else LegOutcome.FAILED, reason, detail, now_s)

    def transfer_closed(self, transfer_id: TransferId, now_s: float) -> list[Instruction]:
        """The corridor will not touch the blocks again. The last event of every expected transfer."""
        leg = self._by_transfer.get(transfer_id)
        if leg is None:
            return []
        leg.transfer_open = False
        if leg.stage is LegStage.ADOPTED:
            leg.release_lease()
            return []
        ended = self._end(leg, LegOutcome.FAILED, "transfer_closed", "closed without KV", now_s)
        return ended + self._let_go(leg, now_s)

    def cancel(self, leg: LegKey, outcome: LegOutcome, reason: str, now_s: float) -> list[Instruction]:
        """End a leg at whatever stage it is."""
        known = self._legs.get(leg)
        return [] if known is None else self._end(known, outcome, reason, "", now_s)

    def cancel_sequences(self, leg: LegKey, sequences: frozenset[int], reason: str, now_s: float) -> list[Instruction]:
        """End some sequences of a leg. When none is left the leg ends: it did its part if one of them ended by itself."""
        known = self._legs.get(leg)
        if known is None:
            return []
        known.cancelled |= sequences & set(known.work.sequences)
        for sequence in known.live_sequences:
            if sequence.index in known.cancelled:
                sequence.end(now_s)
        known.forget_over()
        if known.stage is LegStage.ADOPTED:
            return self._end_if_empty(known, reason, now_s)
        if known.num_growing == 0:
            return self._end(known, LegOutcome.CANCELLED, reason, "", now_s)
        return []

    def constraint_ready(self, leg: LegKey) -> list[Instruction]:
        """What constrains the leg's output is compiled: its sequences may run."""
        known = self._legs.get(leg)
        if known is not None:
            known.awaits_constraint = False
        return []

    def constraint_failed(self, leg: LegKey, reason: str, detail: str, now_s: float) -> list[Instruction]:
        """What should constrain the leg's output cannot be served."""
        known = self._legs.get(leg)
        return [] if known is None else self._end(known, LegOutcome.REFUSED, reason, detail, now_s)

    def expire(self, now_s: float) -> list[Instruction]:
        """End legs whose client's deadline passed, and look again for blocks for those that wait."""
        late = [leg for leg in self._legs.values() if leg.work.deadline_s is not None and now_s > leg.work.deadline_s]
        ended = [step for leg in late for step in self._end(leg, LegOutcome.CANCELLED, "deadline", "", now_s)]
        return ended + self.grant_waiting(now_s)

    def grant_waiting(self, now_s: float) -> list[Instruction]:
        """Promise blocks to those that wait, oldest first."""
        instructions: list[Instruction] = []
        for leg in self._in_order():
            if leg.stage is not LegStage.WAITING:
                continue
            if not self._reserve(leg):
                if now_s - leg.life.entered_s > self._limits.overtake_s:
                    break
                continue
            leg.life.advance(LegEvent.GRANT, now_s)
            assert leg.lease is not None
            assert leg.work.transfer_id is not None
            instructions.append(GrantTransfer(leg.work.leg, leg.work.transfer_id, leg.lease))
        return instructions

    def plan(self, now_s: float) -> tuple[StepPlan | None, list[Instruction]]:
        """Return the next step, or None if nothing can run, and what to do before it."""
        self._admit(now_s)
        instructions: list[Instruction] = []
        for _, sequence in self._sequences(SequenceState.RUNNING):
            if sequence.state is SequenceState.RUNNING:
                instructions += self._make_room(sequence, now_s)
        runnable = [
            (leg, sequence)
            for leg, sequence in self._sequences(SequenceState.RUNNING)
            if not sequence.is_stalled and not self._holds(sequence)
        ]
        instructions += self.grant_waiting(now_s)
        if not runnable:
            return None, instructions
        for leg, sequence in runnable:
            sequence.in_step = True
            leg.durations_s.setdefault("decode.queue", now_s - leg.adopted_s)
        legs, sequences = zip(*runnable, strict=True)
        return StepPlan(sequences, legs, tuple(self._copies(sequences))), instructions

    def step_done(self, plan: StepPlan, results: Seq[ChunkResult], compute_s: float, now_s: float) -> list[Instruction]:
        """Take a step's results: what each sequence of the plan got."""
        instructions: list[Instruction] = []
        legs = dict.fromkeys(plan.legs)
        for leg in legs:
            leg.durations_s["decode.compute"] = leg.durations_s.get("decode.compute", 0.0) + compute_s
        for leg, sequence, result in zip(plan.legs, plan.sequences, results, strict=True):
            sequence.in_step = False
            sequence.drop_source()
            if sequence.state is SequenceState.CLOSING:
                sequence.let_go(now_s)
                instructions += self._let_go(leg, now_s)
                continue
            choice = result.choices[0]
            if isinstance(choice, RowFailed):
                # The request cannot be answered as a whole, so its other sequences need not go on.
                outcome = LegOutcome.REFUSED if choice.is_final else LegOutcome.FAILED
                instructions += self._end(leg, outcome, "no_token", choice.reason, now_s)
                continue
            instructions += self._take_token(leg, sequence, choice, now_s)
        for leg in legs:
            leg.forget_over()
        return instructions

    def step_failed(self, plan: StepPlan, detail: str, now_s: float) -> list[Instruction]:
        """End the legs of a step that raised."""
        for sequence in plan.sequences:
            sequence.in_step = False
            if sequence.state is SequenceState.CLOSING:
                sequence.let_go(now_s)
        instructions: list[Instruction] = []
        for leg in dict.fromkeys(plan.legs):
            instructions += self._end(leg, LegOutcome.FAILED, "engine_error", detail, now_s)
            instructions += self._let_go(leg, now_s)
        return instructions

    @property
    def num_running(self) -> int:
        """Legs with a sequence in the batch."""
        return len({leg for leg, sequence in self._each() if sequence.state is SequenceState.RUNNING})

    @property
    def num_waiting(self) -> int:
        """Legs of which nothing runs yet."""
        return len(self._legs) - self.num_running - self.count_legs(LegStage.CLOSING)

    def count_legs(self, *stages: LegStage) -> int:
        """Return the number of legs at any of `stages`."""
        return sum(leg.stage in stages for leg in self._legs.values())

    def count(self, *states: SequenceState) -> int:
        """Return the number of sequences in any of `states`."""
        return sum(sequence.state in states for _, sequence in self._each())

    @property
    def num_held(self) -> int:
        """Sequences that stand at the test hook."""
        return sum(sequence.is_held for _, sequence in self._each())

    @property
    def num_stalled(self) -> int:
        """Running sequences that wait for a block."""
        return sum(sequence.is_stalled for _, sequence in self._each())

    def describe(self, now_s: float) -> list[dict[str, object]]:
        """Return every leg's stage and age, and how far its sequences are."""
        return [
            {
                "leg": str(key),
                "state": leg.stage.value,
                "age_s": round(leg.life.age_s(now_s), 3),
                "sequences": {s.index: f"{s.state.value} {s.num_cached}" for s in leg.sequences},
            }
            for key, leg in self._legs.items()
        ]

    def check_invariants(self) -> None:
        """Raise InternalError or AssertionError if the books do not agree."""
        self._pool.check_invariants()
        assert len(self._legs) == len(self._by_transfer), "a transfer belongs to one leg"
        leased: set[int] = set()
        for leg in self._legs.values():
            assert leg.stage is not LegStage.OVER, f"{leg.work.leg} is over but on the books"
            assert leg.stage is not LegStage.ADOPTED or leg.live_sequences, f"{leg.work.leg} has nothing left to do"
            assert leg.stage is not LegStage.CLOSING or not leg.live_sequences, f"{leg.work.leg} ended, but goes on"
            assert not leased & leg.block_ids, f"{leg.work.leg} shares blocks with another leg"
            leased |= leg.block_ids
        assert len(leased) == self._pool.num_blocks - self._pool.num_free, "blocks are leased to nobody"

    def _goes_on(self, work: Work, token: SampledToken) -> bool:
        reason = token.finish_reason or work.finish_reason(token.token_id, token.index, self._eos)
        return reason is None

    def _in_order(self) -> list[DecodeLeg]:
        return sorted(self._legs.values(), key=lambda leg: leg.work.arrived_s)

    def _each(self) -> Iterator[tuple[DecodeLeg, Sequence]]:
        """Yield every sequence, in no order: enough for counting."""
        return ((leg, sequence) for leg in self._legs.values() for sequence in leg.sequences)

    def _sequences(self, state: SequenceState) -> list[tuple[DecodeLeg, Sequence]]:
        """Return the sequences in a state, by the age of their legs."""
        return [(leg, sequence) for leg in self._in_order() for sequence in leg.sequences if sequence.state is state]

    def _reserve(self, leg: DecodeLeg) -> bool:
        if leg.lease is not None:
            return True
        needed = leg.num_blocks_to_receive(self._limits.block_size)
        growing = sum(other.num_growing for other in self._legs.values() if other.block_ids)
        if needed + self._limits.growth_blocks * growing > self._pool.num_free:
            return False
        leg.lease = self._pool.try_lease(needed, str(leg.work.leg), reserved=True)
        return leg.lease is not None

    def _admit(self, now_s: float) -> None:
        room = max(0, self._limits.max_batch - self.count(SequenceState.RUNNING))
        ready = [s for leg, s in self._sequences(SequenceState.READY) if not leg.awaits_constraint]
        for sequence in ready[:room]:
            sequence.life.advance(SequenceEvent.RUN, now_s)

    def _make_room(self, sequence: Sequence, now_s: float) -> list[Instruction]:
        """Give a running sequence the block that its next token needs, at the cost of the youngest leg if must be."""
        needed = num_blocks_for(sequence.num_cached + 1, self._limits.block_size) - len(sequence.lease.block_ids)
        instructions: list[Instruction] = []
        while needed > self._pool.num_free and not self._blocks_on_their_way():
            victim = self._youngest()
            if victim is None:
                break
            self.num_evicted += 1
            instructions += self._end(victim, LegOutcome.EVICTED, "out_of_blocks", "the youngest gives way", now_s)
            if sequence.state is not SequenceState.RUNNING:
                return instructions
        sequence.is_stalled = needed > self._pool.num_free
        if not sequence.is_stalled and needed > 0:
            sequence.lease.extend(needed)
        return instructions

    def _blocks_on_their_way(self) -> bool:
        return any(leg.stage is LegStage.CLOSING and leg.block_ids for leg in self._legs.values())

    def _youngest(self) -> DecodeLeg | None:
        holders = [leg for leg in self._in_order() if leg.stage is not LegStage.CLOSING and leg.block_ids]
        return holders[-1] if len(holders) > 1 else None

    def _copies(self, runnable: Seq[Sequence]) -> list[BlockCopy]:
        copies = []
        for sequence in runnable:
            if sequence.source is not None:
                full, rest = divmod(sequence.work.context_len, self._limits.block_size)
                copies.append(BlockCopy(sequence.source.block_ids[0], sequence.lease.block_ids[full], rest))
        self.num_copied += len(copies)
        return copies

    def _take_token(self, leg: DecodeLeg, sequence: Sequence, choice: Chosen, now_s: float) -> list[Instruction]:
        work, index = sequence.work, sequence.next_index
        reason = work.finish_reason(choice.token_id, index, self._eos)
        token = SampledToken(index, choice.token_id, choice.logprob, reason, sequence.index, choice.top)
        sequence.last_token = token
        sequence.num_cached += 1
        report = ReportToken(work.leg, token)
        if reason is None:
            return [report]
        leg.has_finished = True
        sequence.end(now_s)
        return [report, *self._end_if_empty(leg, "finished", now_s)]

    def _end_if_empty(self, leg: DecodeLeg, reason: str, now_s: float) -> list[Instruction]:
        """End a leg of which no sequence goes on."""
        if leg.live_sequences:
            return []
        if leg.has_finished:
            return self._end(leg, LegOutcome.FINISHED, "finished", "", now_s)
        return self._end(leg, LegOutcome.CANCELLED, reason, "", now_s)

    def _end(self, leg: DecodeLeg, outcome: LegOutcome, reason: str, detail: str, now_s: float) -> list[Instruction]:
        if leg.stage is LegStage.OVER or not leg.life.advance(LegEvent.END, now_s):
            return []
        for sequence in leg.live_sequences:
            sequence.end(now_s)
        instructions: list[Instruction] = [ReportEnd(leg.work.leg, outcome, reason, detail)]
        if leg.transfer_open and leg.work.transfer_id is not None:
            is_busy = outcome in (LegOutcome.EVICTED, LegOutcome.DRAINED)
            instructions.append(CancelTransfer(leg.work.transfer_id, reason, is_busy))
        return instructions + self._let_go(leg, now_s)

    def _let_go(self, leg: DecodeLeg, now_s: float) -> list[Instruction]:
        if leg.stage is not LegStage.CLOSING or not leg.is_untouched:
            return []
        leg.life.advance(LegEvent.LET_GO, now_s)
        leg.release_lease()
        work = leg.work
        del self._legs[work.leg]
        assert work.transfer_id is not None
        del self._by_transfer[work.transfer_id]
        return [ReportRelease(work.leg, leg.durations_s)]

    def _holds(self, sequence: Sequence) -> bool:
        attempt = sequence.work.leg.attempt
        sequence.is_held = self._hold is not None and self._hold.at(HoldStage.DECODING, attempt, sequence.next_index)
        return sequence.is_held
