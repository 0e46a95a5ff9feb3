"""What the processors of a sequence's logits know of it, made from its leg alone: the same on both nodes and after a resume."""

from pdserve.core.work import Work
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import Matcher, RowState


def row_state(engine: Engine, work: Work, matcher: Matcher | None) -> RowState:
    """Return the state of a sequence at output index `work.next_index`: before the first token of this attempt.

    `matcher` stands at the beginning of the answer.
    """
    end_ids = work.stop_token_ids if work.ignore_eos else work.stop_token_ids | engine.eos_token_ids
    return RowState(
        work.sampling,
        work.prompt_ids,
        work.output_ids,
        end_ids=frozenset(token_id for token_id in end_ids if token_id < engine.vocab_size),
        min_tokens=work.min_tokens,
        matcher=matcher,
    )
