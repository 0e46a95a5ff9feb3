"""The prefill scheduler: events in, instructions out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.hold import Hold, HoldStage
from pdserve.core.work import LegOutcome
from pdserve.engine.batch import Chosen, ChunkResult, RowFailed
from pdserve.engine.blocks import BlockPool
from pdserve.node.reports import ReportEnd, ReportRelease
from pdserve.prefill_node.instructions import (
    AbortTransfer,
    BindBlocks,
    CommitTransfer,
    Instruction,
    OpenTransfer,
    ReportFirstToken,
    StepPlan,
)
from pdserve.prefill_node.job import JOB_TABLE, JobEvent, JobState
from pdserve.prefill_node.scheduler import PrefillLimits, PrefillScheduler
from tests.node.works import leg, transfer, work

EOS = 2
TOKEN = ChunkResult((Chosen(7, -0.25),))
NOTHING = ChunkResult()


def scheduler(blocks: int = 16, *, budget: int = 16, ahead: int = 4, hold: Hold | None = None) -> PrefillScheduler:
    limits = PrefillLimits(
        token_budget=budget, max_prompts_per_step=8, open_ahead=ahead, max_model_len=64, block_size=4
    )
    return PrefillScheduler(limits, BlockPool(blocks), frozenset({EOS}), hold)


def step(target: PrefillScheduler, result: ChunkResult = TOKEN) -> tuple[list[tuple[int, range]], list[Instruction]]:
    """Plan and finish one step; the chunks as (session, tokens), and every instruction."""
    plan, before = target.plan(1.0)
    if plan is None:
        return [], before
    results = [result if chunk.sequences else NOTHING for chunk in plan.chunks]
    after = target.step_done(plan, results, 0.1, 1.1)
    return [(chunk.job.work.leg.session.session_id, chunk.tokens) for chunk in plan.chunks], before + after


def kinds(instructions: list[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_one_step_holds_chunks_of_three_prompts() -> None:
    target = scheduler(budget=20)
    for number in (1, 2, 3):
        target.submit(work(number, prompt=8), 0.0)
        target.granted(transfer(number), 0.0)
    chunks, _ = step(target)
    assert chunks == [(1, range(8)), (2, range(8)), (3, range(4))]
    target.check_invariants()


def test_the_walk_of_a_prompt() -> None:
    target = scheduler(budget=5)
    assert target.submit(work(1, prompt=8), 0.0) == [OpenTransfer(work(1, prompt=8))]
    assert step(target) == ([], [])
    target.granted(transfer(1), 0.5)
    chunks, instructions = step(target)
    assert chunks == [(1, range(5))]
    assert kinds(instructions) == [BindBlocks]
    chunks, instructions = step(target)
    assert chunks == [(1, range(5, 8))]
    assert kinds(instructions) == [ReportFirstToken, CommitTransfer]
    assert kinds(target.acked(transfer(1), 0.01, 0.0, 2.0)) == [ReportEnd]
    target.check_invariants()
    [release] = target.transfer_closed(transfer(1), 4096, 3, 0.02, 2.1)
    assert isinstance(release, ReportRelease)
    assert (release.kv_bytes, release.kv_frames, release.durations_s["prefill.exposed_transfer"]) == (4096, 3, 0.01)
    assert target.num_running == 0
    target.check_invariants()


def test_ungranted_prompts_are_passed_over() -> None:
    target = scheduler()
    target.submit(work(1), 0.0)
    target.submit(work(2), 0.0)
    target.granted(transfer(2), 0.0)
    chunks, _ = step(target)
    assert chunks == [(2, range(8))]


def test_only_the_head_of_the_queue_asks_for_blocks() -> None:
    target = scheduler(ahead=2)
    opened = [instruction for number in range(5) for instruction in target.submit(work(number), 0.0)]
    assert [item.work.leg.session.session_id for item in opened if isinstance(item, OpenTransfer)] == [0, 1]
    target.granted(transfer(0), 0.0)
    _, instructions = step(target)
    assert [i.work.leg.session.session_id for i in instructions if isinstance(i, OpenTransfer)] == []
    _, instructions = step(target)
    assert [i.work.leg.session.session_id for i in instructions if isinstance(i, OpenTransfer)] == [2]


@pytest.mark.parametrize("token", [EOS, 9])
def test_a_sequence_that_ends_at_its_first_token_is_never_committed(token: int) -> None:
    target = scheduler()
    target.submit(work(1, stop_token_ids=frozenset({9})), 0.0)
    target.granted(transfer(1), 0.0)
    _, instructions = step(target, ChunkResult((Chosen(token, -0.1),)))
    assert kinds(instructions) == [BindBlocks, ReportFirstToken, AbortTransfer, ReportEnd]
    assert AbortTransfer(transfer(1), "finished", finished=True) in instructions
    assert kinds(target.transfer_closed(transfer(1), 0, 0, 0.0, 2.0)) == [ReportRelease]
    target.check_invariants()


def test_nothing_is_handed_over_for_a_single_token() -> None:
    target = scheduler()
    assert target.submit(work(1, max_tokens=1, hands_over=False), 0.0) == []
    _, instructions = step(target)
    assert kinds(instructions) == [ReportFirstToken, ReportEnd, ReportRelease]
    assert target.num_running == 0
    target.check_invariants()


def test_cancel_during_a_step_frees_blocks_only_after_it() -> None:
    target = scheduler()
    target.submit(work(1), 0.0)
    target.granted(transfer(1), 0.0)
    plan, _ = target.plan(1.0)
    assert plan is not None
    assert kinds(target.cancel(leg(1), LegOutcome.CANCELLED, "client", 1.0)) == [ReportEnd, AbortTransfer]
    assert target.transfer_closed(transfer(1), 0, 0, 0.0, 1.1) == []
    assert target.num_running == 1, "the step still writes into the blocks"
    assert kinds(target.step_done(plan, [TOKEN], 0.1, 1.2)) == [ReportRelease]
    target.check_invariants()


def test_cancelled_long_prompts_do_not_delay_a_short_one() -> None:
    target = scheduler(blocks=64, budget=16, ahead=16)
    for number in range(10):
        target.submit(work(number, prompt=40), 0.0)
        target.granted(transfer(number), 0.0)
    target.submit(work(99, prompt=4), 0.0)
    target.granted(transfer(99), 0.0)
    for number in range(10):
        target.cancel(leg(number), LegOutcome.CANCELLED, "client", 0.5)
        target.transfer_closed(transfer(number), 0, 0, 0.0, 0.5)
    chunks, _ = step(target)
    assert chunks == [(99, range(4))]


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    for prompt, blocks in ((64, 32), (33, 8)):
        end, release = scheduler(blocks=blocks).submit(work(1, prompt=prompt), 0.0)
        assert isinstance(end, ReportEnd)
        assert isinstance(release, ReportRelease)
        assert (end.outcome, end.reason) == (LegOutcome.REFUSED, "never_fits")


@pytest.mark.parametrize(
    ("is_final", "outcome"), [(False, LegOutcome.FAILED), (True, LegOutcome.REFUSED)], ids=["machine", "request"]
)
def test_a_row_without_a_token_ends_its_own_prompt_only(is_final: bool, outcome: LegOutcome) -> None:
    """Where another try would end the same way, the router is told not to make one."""
    target = scheduler()
    for number in (1, 2):
        target.submit(work(number), 0.0)
        target.granted(transfer(number), 0.0)
    plan, _ = target.plan(1.0)
    assert plan is not None
    told = target.step_done(plan, [ChunkResult((RowFailed("why", is_final),)), TOKEN], 0.1, 1.1)
    assert ReportEnd(leg(1), outcome, "no_token", "why") in told
    assert kinds(told)[-2:] == [ReportFirstToken, CommitTransfer]


def test_a_transfer_id_is_used_once() -> None:
    """A faulty router must not make a leg that nobody can end."""
    target = scheduler()
    target.submit(work(1), 0.0)
    end, _ = target.submit(replace(work(2), transfer_id=transfer(1)), 0.0)
    assert end == ReportEnd(leg(2), LegOutcome.REFUSED, "transfer_id_in_use")
    target.check_invariants()


def test_a_failed_step_ends_its_prompts_only() -> None:
    target = scheduler(budget=8)
    for number in (1, 2):
        target.submit(work(number), 0.0)
        target.granted(transfer(number), 0.0)
    plan, _ = target.plan(1.0)
    assert plan is not None
    ended = target.step_failed(plan, "boom", 1.1)
    assert [item.leg for item in ended if isinstance(item, ReportEnd)] == [leg(1)]
    target.transfer_closed(transfer(1), 0, 0, 0.0, 1.2)
    assert step(target)[0] == [(2, range(8))]
    target.check_invariants()


@pytest.mark.parametrize(
    ("hold", "expected"),
    [
        (Hold(HoldStage.QUEUED), []),
        (Hold(HoldStage.PREFILLING, 1), [range(4)]),
        (Hold(HoldStage.HANDING_OVER), [range(4), range(4, 8)]),
    ],
)
def test_holds_stand_still_and_can_be_cancelled(hold: Hold, expected: list[range]) -> None:
    target = scheduler(budget=4, hold=hold)
    target.submit(work(1, prompt=8), 0.0)
    target.granted(transfer(1), 0.0)
    seen, told = [], []
    for _ in range(4):
        chunks, instructions = step(target)
        seen += [tokens for _, tokens in chunks]
        told += kinds(instructions)
    assert seen == expected
    assert CommitTransfer not in told
    assert target.num_held == 1
    target.cancel(leg(1), LegOutcome.CANCELLED, "client", 2.0)
    target.transfer_closed(transfer(1), 0, 0, 0.0, 2.0)
    assert target.num_held == 0
    target.check_invariants()


def test_only_a_first_attempt_is_held() -> None:
    target = scheduler(budget=4, hold=Hold(HoldStage.QUEUED))
    target.submit(replace(work(1, prompt=4), leg=leg(1, attempt=2)), 0.0)
    target.granted(transfer(1), 0.0)
    assert step(target)[0] == [(1, range(4))]
    assert target.num_held == 0


def test_the_table_answers_what_the_world_may_send() -> None:
    from_the_world = {JobEvent.GRANT, JobEvent.END}
    alive = set(JobState) - {JobState.OVER}
    open_pairs = {pair for pair in JOB_TABLE.missing() if pair[1] in from_the_world and pair[0] in alive}
    assert open_pairs == set()


KINDS = ["submit", "grant", "ack", "fail", "close", "cancel", "cancel some", "plan", "done"]
EVENT = st.tuples(st.integers(0, 4), st.sampled_from(KINDS), st.integers(1, 7))
SIZES = (1, 2, 1, 3, 2)
"""Sequences of each prompt."""


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENT, max_size=60), st.integers(4, 12))
def test_any_order_of_events_keeps_the_books(events: list[tuple[int, str, int]], blocks: int) -> None:
    """Failure classes 3 and 11: races are normal. Nothing raises, every leg is released once, every block comes home."""
    target = scheduler(blocks=blocks, budget=6)
    submitted: set[int] = set()
    opened: set[int] = set()
    released: list[int] = []
    running: StepPlan | None = None

    def take(instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, OpenTransfer):
                opened.add(instruction.work.leg.session.session_id)
            if isinstance(instruction, ReportRelease):
                released.append(instruction.leg.session.session_id)

    def finish_step() -> None:
        nonlocal running
        if running is not None:
            take(
                target.step_done(
                    running, [ChunkResult(TOKEN.choices * len(c.sequences)) for c in running.chunks], 0.1, 1.0
                )
            )
        running = None

    for number, event, some in events:
        if event == "submit" and number not in submitted:
            submitted.add(number)
            take(target.submit(work(number, prompt=4 + 3 * number, sequences=SIZES[number]), 0.0))
        elif event == "plan" and running is None:
            running, before = target.plan(1.0)
            take(before)
        elif event == "done":
            finish_step()
        elif event == "cancel":
            take(target.cancel(leg(number), LegOutcome.CANCELLED, "client", 1.0))
        elif event == "cancel some":
            indexes = frozenset(index for index in range(3) if some >> index & 1)
            take(target.cancel_sequences(leg(number), indexes, "stop", 1.0))
        elif number in opened:
            take(
                {
                    "grant": lambda n: target.granted(transfer(n), 1.0),
                    "ack": lambda n: target.acked(transfer(n), 0.0, 0.0, 1.0),
                    "fail": lambda n: target.transfer_failed(transfer(n), "nack", "", busy=False, now_s=1.0),
                    "close": lambda n: target.transfer_closed(transfer(n), 0, 0, 0.0, 1.0),
                }.get(event, lambda _: [])(number)
            )
        target.check_invariants()
    finish_step()
    for number in sorted(submitted):
        take(target.cancel(leg(number), LegOutcome.CANCELLED, "client", 2.0))
        take(target.transfer_closed(transfer(number), 0, 0, 0.0, 2.0))
    assert sorted(released) == sorted(submitted)
    assert target.num_running == target.num_waiting == 0
    target.check_invariants()
