"""Several sequences from one prompt (failure classes 10 and 11), prompt scores, and what waits for a constraint."""

from dataclasses import replace

import pytest

from pdserve.core.work import FinishReason, Grammar, GrammarKind, LegOutcome, Sampling, TokenScore
from pdserve.engine.batch import Chosen, ChunkResult, RowFailed
from pdserve.engine.blocks import BlockPool
from pdserve.node.reports import ReportEnd, ReportRelease
from pdserve.prefill_node.instructions import (
    AbortTransfer,
    CommitTransfer,
    Instruction,
    PlannedChunk,
    ReportFirstToken,
    ReportPromptScores,
    StepPlan,
)
from pdserve.prefill_node.scheduler import PrefillLimits, PrefillScheduler
from tests.node.works import leg, transfer, work

EOS = 2
CONSTRAINED = Sampling(grammar=Grammar(GrammarKind.REGEX, "a+"))


def scheduler(*, budget: int = 16) -> PrefillScheduler:
    limits = PrefillLimits(token_budget=budget, max_prompts_per_step=8, open_ahead=4, max_model_len=64, block_size=4)
    return PrefillScheduler(limits, BlockPool(16), frozenset({EOS}))


def chosen(*token_ids: int) -> ChunkResult:
    return ChunkResult(tuple(Chosen(token_id, -0.1, ((token_id, -0.1),)) for token_id in token_ids))


def plan(target: PrefillScheduler) -> StepPlan:
    made, _ = target.plan(1.0)
    assert made is not None
    return made


def kinds(instructions: list[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def only_chunk(made: StepPlan) -> PlannedChunk:
    [chunk] = made.chunks
    return chunk


def close(target: PrefillScheduler, number: int = 1) -> list[type]:
    """Let the corridor go; everything must then be as in the beginning."""
    told = kinds(target.transfer_closed(transfer(number), 0, 0, 0.0, 2.0))
    assert target.num_running == target.num_waiting == 0
    assert target._pool.num_free == 16
    target.check_invariants()
    return told


def test_one_prompt_gives_a_first_token_for_every_sequence() -> None:
    target = scheduler(budget=5)
    target.submit(work(1, sequences=3, first_sequence=4), 0.0)
    target.granted(transfer(1), 0.0)
    made = plan(target)
    assert only_chunk(made).sequences == ()
    target.step_done(made, [ChunkResult()], 0.1, 1.1)
    made = plan(target)
    assert only_chunk(made).sequences == (4, 5, 6)
    assert target._pool.num_free == 16 - 2, "the context's blocks, once"
    report, commit = target.step_done(made, [chosen(7, 8, EOS)], 0.1, 1.2)
    assert isinstance(report, ReportFirstToken)
    assert isinstance(commit, CommitTransfer)
    assert report.tokens == commit.tokens
    told = [(token.sequence, token.index, token.token_id, token.finish_reason, token.top) for token in report.tokens]
    assert told == [
        (4, 0, 7, None, ((7, -0.1),)),
        (5, 0, 8, None, ((8, -0.1),)),
        (6, 0, EOS, FinishReason.STOP, ((EOS, -0.1),)),
    ]
    assert kinds(target.acked(transfer(1), 0.0, 0.0, 2.0)) == [ReportEnd]
    assert close(target) == [ReportRelease]


def test_when_all_end_at_their_first_token_nothing_is_committed() -> None:
    target = scheduler()
    target.submit(work(1, sequences=2, stop_token_ids=frozenset({9})), 0.0)
    target.granted(transfer(1), 0.0)
    told = target.step_done(plan(target), [chosen(9, EOS)], 0.1, 1.1)
    assert kinds(told) == [ReportFirstToken, AbortTransfer, ReportEnd]
    assert AbortTransfer(transfer(1), "finished", finished=True) in told
    assert close(target) == [ReportRelease]


def test_a_single_token_each_opens_no_transfer() -> None:
    target = scheduler()
    assert target.submit(work(1, max_tokens=1, hands_over=False, sequences=3), 0.0) == []
    report, *rest = target.step_done(plan(target), [chosen(7, 8, EOS)], 0.1, 1.1)
    assert isinstance(report, ReportFirstToken)
    reasons = [token.finish_reason for token in report.tokens]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.STOP]
    assert kinds(rest) == [ReportEnd, ReportRelease]
    assert target._pool.num_free == 16


@pytest.mark.parametrize("in_step", [False, True])
def test_a_sequence_that_is_cancelled_early_gets_no_token(in_step: bool) -> None:
    target = scheduler()
    target.submit(work(1, sequences=3), 0.0)
    target.granted(transfer(1), 0.0)
    made = plan(target) if in_step else None
    assert target.cancel_sequences(leg(1), frozenset({1}), "stop", 0.5) == []
    made = made or plan(target)
    assert only_chunk(made).sequences == ((0, 1, 2) if in_step else (0, 2))
    report, commit = target.step_done(made, [chosen(*([7] * len(only_chunk(made).sequences)))], 0.1, 1.1)
    assert isinstance(report, ReportFirstToken)
    assert isinstance(commit, CommitTransfer)
    assert [token.sequence for token in report.tokens] == [token.sequence for token in commit.tokens] == [0, 2]


def test_when_the_last_sequence_is_cancelled_the_leg_ends() -> None:
    target = scheduler()
    target.submit(work(1, sequences=2), 0.0)
    target.granted(transfer(1), 0.0)
    made = plan(target)
    target.cancel_sequences(leg(1), frozenset({0}), "stop", 0.5)
    told = target.cancel_sequences(leg(1), frozenset({1}), "stop", 0.6)
    assert told == [ReportEnd(leg(1), LegOutcome.CANCELLED, "stop"), AbortTransfer(transfer(1), "stop")]
    assert target.step_done(made, [chosen(7, 8)], 0.1, 1.1) == []
    assert close(target) == [ReportRelease]
    assert target.cancel_sequences(leg(1), frozenset({1}), "late", 3.0) == []


def test_a_handover_of_which_nothing_goes_on_is_aborted_as_finished() -> None:
    target = scheduler()
    target.submit(work(1, sequences=3), 0.0)
    target.granted(transfer(1), 0.0)
    target.step_done(plan(target), [chosen(EOS, 7, 8)], 0.1, 1.1)
    assert target.cancel_sequences(leg(1), frozenset({1}), "stop", 1.2) == []
    told = target.cancel_sequences(leg(1), frozenset({2}), "stop", 1.3)
    assert told == [
        AbortTransfer(transfer(1), "finished", finished=True),
        ReportEnd(leg(1), LegOutcome.FINISHED, "finished"),
    ]
    assert close(target) == [ReportRelease]


def test_a_row_without_a_token_fails_the_leg_and_tells_no_token() -> None:
    target = scheduler()
    target.submit(work(1, sequences=2), 0.0)
    target.granted(transfer(1), 0.0)
    result = ChunkResult((Chosen(7, -0.1), RowFailed("no token is allowed")))
    told = target.step_done(plan(target), [result], 0.1, 1.1)
    assert told[0] == ReportEnd(leg(1), LegOutcome.FAILED, "no_token", "no token is allowed")
    assert kinds(told) == [ReportEnd, AbortTransfer]
    assert close(target) == [ReportRelease]


def test_a_cancelled_sequence_for_which_there_is_no_token_takes_nobody_along() -> None:
    target = scheduler()
    target.submit(work(1, sequences=2), 0.0)
    target.granted(transfer(1), 0.0)
    made = plan(target)
    target.cancel_sequences(leg(1), frozenset({1}), "stop", 1.0)
    told = target.step_done(made, [ChunkResult((Chosen(7, -0.1), RowFailed("no token is allowed")))], 0.1, 1.2)
    assert kinds(told) == [ReportFirstToken, CommitTransfer]
    target.cancel(leg(1), LegOutcome.CANCELLED, "", 1.3)
    assert close(target) == [ReportRelease]


@pytest.mark.parametrize("output", [0, 3])
def test_every_prompt_token_but_the_first_is_scored_once_and_told_before_the_first_token(output: int) -> None:
    target = scheduler(budget=3)
    target.submit(replace(work(1, prompt=8, output=output, max_tokens=9), prompt_logprobs=True), 0.0)
    target.granted(transfer(1), 0.0)
    told: list[Instruction] = []
    scored: list[int] = []
    while not any(isinstance(item, ReportFirstToken) for item in told):
        made = plan(target)
        chunk = only_chunk(made)
        assert all(position - 1 in chunk.tokens for position in chunk.scored)
        scored += chunk.scored
        scores = tuple(TokenScore(-float(position)) for position in chunk.scored)
        choices = chosen(7).choices if chunk.sequences else ()
        told += target.step_done(made, [ChunkResult(choices, scores)], 0.1, 1.1)
    assert scored == list(range(1, 8)), "of the prompt; what was answered already is not part of it"
    reports = [item for item in told if isinstance(item, ReportPromptScores)]
    assert [score.logprob for item in reports for score in item.scores] == [-float(position) for position in scored]
    assert [item.start for item in reports] == [1, 4, 7]
    assert kinds(told) == [ReportPromptScores] * 3 + [ReportFirstToken, CommitTransfer]


def test_nothing_is_scored_unasked() -> None:
    target = scheduler()
    target.submit(work(1), 0.0)
    target.granted(transfer(1), 0.0)
    assert len(only_chunk(plan(target)).scored) == 0


def test_a_prompt_waits_for_its_constraint_with_its_last_token_only() -> None:
    target = scheduler(budget=5)
    for number, sampling in ((1, CONSTRAINED), (2, Sampling())):
        target.submit(work(number, sampling=sampling), 0.0)
        target.granted(transfer(number), 0.0)
    seen = []
    for _ in range(3):
        made = plan(target)
        seen += [(chunk.job.work.leg.session.session_id, chunk.tokens) for chunk in made.chunks]
        target.step_done(made, [chosen(7) if chunk.sequences else ChunkResult() for chunk in made.chunks], 0.1, 1.1)
    assert seen == [(1, range(5)), (1, range(5, 7)), (2, range(3)), (2, range(3, 8))]
    assert target.plan(1.0)[0] is None
    assert target.constraint_ready(leg(1)) == []
    assert only_chunk(plan(target)).tokens == range(7, 8)
    assert target.constraint_ready(leg(3)) == target.constraint_failed(leg(3), "bad_grammar", "", 1.0) == []


@pytest.mark.parametrize("in_step", [False, True])
def test_a_constraint_that_fails_refuses_the_leg(in_step: bool) -> None:
    target = scheduler()
    target.submit(work(1, sampling=CONSTRAINED), 0.0)
    target.granted(transfer(1), 0.0)
    made = plan(target) if in_step else None
    end, abort = target.constraint_failed(leg(1), "bad_grammar", "why", 1.0)
    assert end == ReportEnd(leg(1), LegOutcome.REFUSED, "bad_grammar", "why")
    assert abort == AbortTransfer(transfer(1), "bad_grammar")
    assert target.constraint_failed(leg(1), "bad_grammar", "again", 1.0) == []
    if made is not None:
        target.step_done(made, [ChunkResult()], 0.1, 1.1)
    assert close(target) == [ReportRelease]
