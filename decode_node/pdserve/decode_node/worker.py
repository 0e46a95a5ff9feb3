"""Runs a planned step on the engine, in the engine's thread: one forward pass, one token per sequence."""

from pdserve.core.clock import Clock
from pdserve.decode_node.scheduler import StepPlan
from pdserve.decode_node.sequence import Sequence
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import SampledRow
from pdserve.node.step_loop import StepRecord


class DecodeWorker:
    """Executes step plans. `execute` runs in the engine's thread and touches nothing but the engine."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock

    def execute(self, plan: StepPlan) -> StepRecord:
        """Run one forward pass over the plan's sequences."""
        started_s = self._clock.now_s()
        result = self._engine.step([_chunk(sequence) for sequence in plan.sequences])
        return StepRecord(result.chunks, self._clock.now_s() - started_s)


def _chunk(sequence: Sequence) -> SequenceChunk:
    assert sequence.lease is not None, "a planned sequence holds blocks"
    assert sequence.last_token is not None, "a planned sequence has its first token"
    return SequenceChunk(
        token_ids=(sequence.last_token.token_id,),
        start=sequence.num_cached,
        block_ids=sequence.lease.block_ids,
        samples=(SampledRow(sequence.work.sampling, sequence.work.first_sequence, sequence.next_index),),
    )
