"""Runs a planned step on the engine, in the engine's thread, and marks every layer ready the moment it is written."""

from collections.abc import Callable

from pdserve.core.clock import Clock
from pdserve.core.ids import TransferId
from pdserve.core.work import Work
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import RowState, SampledRow
from pdserve.node.constraints import MatcherOf
from pdserve.node.row_state import row_state
from pdserve.node.step_loop import StepRecord
from pdserve.prefill_node.instructions import PlannedChunk, StepPlan

MarkReady = Callable[[TransferId, range, range], None]
"""Given (transfer, layers, token positions): these lie in the pool now."""


class PrefillWorker:
    """Executes step plans. `execute` runs in the engine's thread and touches nothing but the engine and `mark_ready`."""

    def __init__(self, engine: Engine, mark_ready: MarkReady, matcher_of: MatcherOf, clock: Clock) -> None:
        self._engine, self._mark_ready, self._matcher_of, self._clock = engine, mark_ready, matcher_of, clock

    def execute(self, plan: StepPlan) -> StepRecord:
        """Run one forward pass over the plan's chunks."""
        started_s = self._clock.now_s()
        handed_over = [
            (chunk.job.work.transfer_id, chunk.tokens)
            for chunk in plan.chunks
            if chunk.job.work.transfer_id is not None
        ]

        def on_layer(layer: int) -> None:
            for transfer_id, tokens in handed_over:
                self._mark_ready(transfer_id, range(layer, layer + 1), tokens)

        result = self._engine.step([self._chunk(planned) for planned in plan.chunks], on_layer)
        return StepRecord(result.chunks, self._clock.now_s() - started_s)

    def _chunk(self, planned: PlannedChunk) -> SequenceChunk:
        work, lease = planned.job.work, planned.job.lease
        assert lease is not None, "a planned prompt holds blocks"
        tokens, scored = planned.tokens, planned.scored
        return SequenceChunk(
            token_ids=work.context_ids[tokens.start : tokens.stop],
            start=tokens.start,
            block_ids=lease.block_ids,
            samples=self._rows(work, planned.sequences),
            scored_ids=work.prompt_ids[scored.start : scored.stop],
            num_top=work.top_logprobs,
        )

    def _rows(self, work: Work, sequences: tuple[int, ...]) -> tuple[SampledRow, ...]:
        """Return a row per sequence. All read one state: none of them has a token of its own yet."""
        is_needed = bool(sequences) and RowState.is_needed(work.sampling, work.min_tokens)
        state = row_state(self._engine, work, self._matcher_of(work)) if is_needed else None
        return tuple(
            SampledRow(work.sampling, sequence, work.next_index, work.top_logprobs, state) for sequence in sequences
        )
