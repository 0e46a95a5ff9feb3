"""Runs a planned step on the engine, in the engine's thread: one forward pass, one token per sequence."""

from weakref import WeakKeyDictionary

from pdserve.core.clock import Clock
from pdserve.decode_node.instructions import StepPlan
from pdserve.decode_node.sequence import Sequence
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import RowState, SampledRow
from pdserve.node.constraints import MatcherOf
from pdserve.node.row_state import row_state
from pdserve.node.step_loop import StepRecord


class DecodeWorker:
    """Executes step plans. `execute` runs in the engine's thread and touches nothing but the engine and its own row states.

    A row state is made at a sequence's first step, from token ids alone, and goes with the sequence.
    """

    def __init__(self, engine: Engine, matcher_of: MatcherOf, clock: Clock) -> None:
        self._engine, self._matcher_of, self._clock = engine, matcher_of, clock
        self._states: WeakKeyDictionary[Sequence, RowState] = WeakKeyDictionary()

    def execute(self, plan: StepPlan) -> StepRecord:
        """Copy what must be copied, then run one forward pass over the plan's sequences."""
        started_s = self._clock.now_s()
        for copy in plan.copies:
            self._engine.copy_block(copy.source, copy.target, copy.num_positions)
        result = self._engine.step([self._chunk(sequence) for sequence in plan.sequences])
        return StepRecord(result.chunks, self._clock.now_s() - started_s)

    def _chunk(self, sequence: Sequence) -> SequenceChunk:
        work = sequence.work
        state = self._state(sequence)
        row = SampledRow(work.sampling, sequence.index, sequence.next_index, work.top_logprobs, state)
        return SequenceChunk(
            token_ids=(sequence.last_token.token_id,),
            start=sequence.num_cached,
            block_ids=sequence.lease.block_ids,
            samples=(row,),
        )

    def _state(self, sequence: Sequence) -> RowState | None:
        """Return the state of a sequence up to its last token, or None if its sampling needs none."""
        work, token_id = sequence.work, sequence.last_token.token_id
        if not RowState.is_needed(work.sampling, work.min_tokens):
            return None
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = row_state(self._engine, work, self._matcher_of(work))
        state.accept(token_id)
        return state
