"""The decode scheduler: events in, instructions out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.hold import Hold, HoldStage
from pdserve.core.work import FinishReason, LegOutcome, SampledToken
from pdserve.decode_node.instructions import (
    CancelTransfer,
    ExpectTransfer,
    GrantTransfer,
    Instruction,
    ReportAdopted,
    ReportToken,
    StepPlan,
)
from pdserve.decode_node.leg import DECODE_LEG_TABLE, LegEvent, LegStage
from pdserve.decode_node.limits import DecodeLimits
from pdserve.decode_node.scheduler import DecodeScheduler
from pdserve.decode_node.sequence import SEQUENCE_TABLE, SequenceEvent, SequenceState
from pdserve.engine.batch import Chosen, ChunkResult, RowFailed
from pdserve.engine.blocks import BlockPool
from pdserve.node.reports import ReportEnd, ReportRelease
from tests.node.works import leg, transfer, work

EOS = 2
FIRST = SampledToken(0, 50, -0.5)


def scheduler(
    blocks: int = 16, *, batch: int = 8, growth: int = 0, on_submit: bool = False, hold: Hold | None = None
) -> DecodeScheduler:
    limits = DecodeLimits(
        max_batch=batch, max_model_len=64, block_size=4, growth_blocks=growth, reserve_on_submit=on_submit
    )
    return DecodeScheduler(limits, BlockPool(blocks), frozenset({EOS}), hold)


def adopt(target: DecodeScheduler, number: int, **of_work: int) -> list[Instruction]:
    """Bring a sequence into READY; every instruction on the way."""
    told = target.submit(work(number, **of_work), 0.0)  # type: ignore[arg-type] # all are numbers here
    told += target.opened(transfer(number), 0.0)
    first = SampledToken(of_work.get("output", 0), 50, -0.5)
    told += target.received(transfer(number), (first,), 0.0, 0.01, 0.5)
    return told + target.transfer_closed(transfer(number), 0.5)


def answer(token_id: int = 7) -> ChunkResult:
    return ChunkResult((Chosen(token_id, -0.1),))


def step(target: DecodeScheduler, token_id: int = 7) -> tuple[list[int], list[Instruction]]:
    """Plan and finish one step; the sessions that ran, and every instruction."""
    plan, told = target.plan(1.0)
    if plan is None:
        return [], told
    told = told + target.step_done(plan, [answer(token_id)] * len(plan.sequences), 0.1, 1.1)
    return [sequence.work.leg.session.session_id for sequence in plan.sequences], told


def kinds(instructions: list[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_the_walk_of_a_sequence() -> None:
    target = scheduler()
    told = adopt(target, 1, prompt=8, max_tokens=3)
    assert kinds(told) == [ExpectTransfer, GrantTransfer, ReportAdopted]
    ran, told = step(target)
    assert ran == [1]
    assert told == [ReportToken(leg(1), SampledToken(1, 7, -0.1))]
    _, told = step(target)
    assert told[0] == ReportToken(leg(1), SampledToken(2, 7, -0.1, FinishReason.LENGTH))
    assert kinds(told) == [ReportToken, ReportEnd, ReportRelease]
    assert target._pool.num_free == 16
    target.check_invariants()


def test_all_running_sequences_share_one_step() -> None:
    target = scheduler(blocks=64)
    for number in range(6):
        adopt(target, number)
    assert step(target)[0] == list(range(6))


def test_the_batch_is_bounded_and_refilled_in_order_of_age() -> None:
    target = scheduler(blocks=64, batch=2)
    for number in range(3):
        adopt(target, number, max_tokens=2)
    assert step(target)[0] == [0, 1]
    assert step(target)[0] == [2]


@pytest.mark.parametrize(("token_id", "reason"), [(EOS, FinishReason.STOP), (9, FinishReason.STOP)])
def test_eos_and_stop_ids_end_a_sequence(token_id: int, reason: FinishReason) -> None:
    target = scheduler()
    target.submit(work(1, max_tokens=40, stop_token_ids=frozenset({9})), 0.0)
    target.opened(transfer(1), 0.0)
    target.received(transfer(1), (FIRST,), 0.0, 0.0, 0.5)
    target.transfer_closed(transfer(1), 0.5)
    _, told = step(target, token_id)
    assert told[0] == ReportToken(leg(1), SampledToken(1, token_id, -0.1, reason))
    assert kinds(told)[1:] == [ReportEnd, ReportRelease]


def test_a_resumed_sequence_counts_from_where_it_was() -> None:
    target = scheduler()
    adopt(target, 1, prompt=8, output=5, max_tokens=8)
    _, told = step(target)
    assert told == [ReportToken(leg(1), SampledToken(6, 7, -0.1))]


def test_finished_at_the_first_token_runs_no_step() -> None:
    target = scheduler()
    target.submit(work(1), 0.0)
    target.opened(transfer(1), 0.0)
    assert kinds(target.finished_early(transfer(1), 0.5)) == [ReportEnd, CancelTransfer]
    assert kinds(target.transfer_closed(transfer(1), 0.6)) == [ReportRelease]
    assert step(target)[0] == []
    target.check_invariants()


def test_blocks_are_promised_by_age_and_small_ones_overtake_only_for_a_while() -> None:
    target = scheduler(blocks=8)
    adopt(target, 0, prompt=15)
    target.submit(work(1, prompt=19), 0.0)
    target.submit(work(2, prompt=3), 0.0)
    target.submit(work(3, prompt=3), 0.0)
    assert target.opened(transfer(1), 0.0) == []
    [grant] = target.opened(transfer(2), 1.0)
    assert isinstance(grant, GrantTransfer)
    assert target.opened(transfer(3), 5.0) == [], "the older one has waited long enough"
    ended = target.cancel(leg(0), LegOutcome.CANCELLED, "client", 6.0)
    assert kinds(ended) == [ReportEnd, ReportRelease]
    target.cancel(leg(2), LegOutcome.CANCELLED, "client", 6.0)
    target.transfer_closed(transfer(2), 6.0)
    granted = target.grant_waiting(6.0)
    assert [item.leg for item in granted if isinstance(item, GrantTransfer)] == [leg(1), leg(3)]
    target.check_invariants()


def test_on_submit_reserves_before_the_prefill_node_asks() -> None:
    target = scheduler(blocks=4, on_submit=True)
    target.submit(work(1, prompt=11), 0.0)
    assert target._pool.num_reserved == 3
    target.submit(work(2, prompt=11), 0.0)
    assert target.opened(transfer(2), 0.0) == []
    assert kinds(target.opened(transfer(1), 0.0)) == [GrantTransfer]
    target.check_invariants()


def test_growth_is_kept_free_when_another_is_let_in() -> None:
    target = scheduler(blocks=5, growth=2)
    adopt(target, 1, prompt=7)
    target.submit(work(2, prompt=7), 0.0)
    assert target.opened(transfer(2), 0.0) == []


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    target = scheduler(blocks=4)
    adopt(target, 1, prompt=7, max_tokens=8)
    adopt(target, 2, prompt=7, max_tokens=8)
    evicted = []
    for _ in range(7):
        _, told = step(target)
        evicted += [item for item in told if isinstance(item, ReportEnd) and item.outcome is LegOutcome.EVICTED]
        target.check_invariants()
    assert [item.leg for item in evicted] == [leg(2)]
    assert target._pool.num_free == 4
    assert target.num_evicted == 1


def test_the_oldest_waits_for_blocks_that_come_home_rather_than_evict_more() -> None:
    target = scheduler(blocks=4)
    adopt(target, 1, prompt=7, max_tokens=8)
    target.submit(work(2, prompt=7), 0.0)
    target.opened(transfer(2), 0.0)
    step(target)
    _, told = step(target)
    assert [item.outcome for item in told if isinstance(item, ReportEnd)] == [LegOutcome.EVICTED]
    assert target.num_stalled == 1
    assert step(target)[0] == []
    target.transfer_closed(transfer(2), 2.0)
    assert step(target)[0] == [1]
    assert target.num_stalled == 0
    target.check_invariants()


def test_one_eviction_at_a_time() -> None:
    target = scheduler(blocks=6)
    adopt(target, 1, prompt=7, max_tokens=8)
    for number in (2, 3):
        target.submit(work(number, prompt=7), 0.0)
        target.opened(transfer(number), 0.0)
    told = [item for _ in range(4) for item in step(target)[1]]
    assert [item.leg for item in told if isinstance(item, ReportEnd)] == [leg(3)], "its blocks are on their way"


@pytest.mark.parametrize("busy", [True, False])
def test_what_is_nobodys_failure_is_told_as_such(busy: bool) -> None:
    """Failure counting: a decode pool that is full, evicts or drains must not use up a request's attempts."""
    target = scheduler()
    for number in (1, 2):
        target.submit(work(number), 0.0)
        target.opened(transfer(number), 0.0)
    [end, _] = target.transfer_failed(transfer(1), "no_grant", "", busy=busy, now_s=1.0)
    assert isinstance(end, ReportEnd)
    assert end.outcome is (LegOutcome.BUSY if busy else LegOutcome.FAILED)
    outcome = LegOutcome.DRAINED if busy else LegOutcome.CANCELLED
    assert target.cancel(leg(2), outcome, "why", 1.0)[1] == CancelTransfer(transfer(2), "why", busy)


def test_cancel_during_a_step_frees_blocks_only_after_it() -> None:
    target = scheduler()
    adopt(target, 1)
    plan, _ = target.plan(1.0)
    assert plan is not None
    assert kinds(target.cancel(leg(1), LegOutcome.CANCELLED, "client", 1.0)) == [ReportEnd]
    assert target._pool.num_free < 16
    assert kinds(target.step_done(plan, [answer()], 0.1, 1.1)) == [ReportRelease]
    assert target._pool.num_free == 16


@pytest.mark.parametrize(
    ("is_final", "outcome"), [(False, LegOutcome.FAILED), (True, LegOutcome.REFUSED)], ids=["machine", "request"]
)
def test_a_row_without_a_token_ends_its_own_sequence_only(is_final: bool, outcome: LegOutcome) -> None:
    """Where another try would end the same way, the router is told not to make one."""
    target = scheduler(blocks=32)
    adopt(target, 1)
    adopt(target, 2)
    plan, _ = target.plan(1.0)
    assert plan is not None
    told = target.step_done(plan, [ChunkResult((RowFailed("why", is_final),)), answer()], 0.1, 1.1)
    assert ReportEnd(leg(1), outcome, "no_token", "why") in told
    assert told[-1] == ReportToken(leg(2), SampledToken(1, 7, -0.1))


def test_a_transfer_id_is_used_once() -> None:
    """A faulty router must not make a leg that nobody can end."""
    target = scheduler()
    target.submit(work(1), 0.0)
    end, _ = target.submit(replace(work(2), transfer_id=transfer(1)), 0.0)
    assert end == ReportEnd(leg(2), LegOutcome.REFUSED, "transfer_id_in_use")
    target.check_invariants()


def test_what_can_never_fit_is_refused() -> None:
    for blocks, max_tokens in ((64, 57), (8, 25)):
        end, _ = scheduler(blocks=blocks).submit(work(1, prompt=8, max_tokens=max_tokens), 0.0)
        assert isinstance(end, ReportEnd)
        assert (end.outcome, end.reason) == (LegOutcome.REFUSED, "never_fits")


def test_hold_stops_before_a_token_and_cancel_still_works() -> None:
    target = scheduler(hold=Hold(HoldStage.DECODING, 3))
    adopt(target, 1, max_tokens=9)
    indices = [item.token.index for _ in range(5) for item in step(target)[1] if isinstance(item, ReportToken)]
    assert indices == [1, 2]
    assert target.num_held == 1
    target.cancel(leg(1), LegOutcome.CANCELLED, "client", 2.0)
    assert (target.num_held, target._pool.num_free) == (0, 16)


def test_only_a_first_attempt_is_held() -> None:
    target = scheduler(hold=Hold(HoldStage.DECODING, 2))
    for number in (1, 2):
        target.submit(replace(work(number), leg=leg(number, attempt=number)), 0.0)
        target.opened(transfer(number), 0.0)
        target.received(transfer(number), (SampledToken(0, 50, -0.5),), 0.0, 0.01, 0.5)
        target.transfer_closed(transfer(number), 0.5)
    ran = [session for _ in range(3) for session in step(target)[0]]
    assert (ran, target.num_held) == ([1, 2, 2, 2], 1)


def test_the_tables_answer_what_the_world_may_send() -> None:
    from_the_world = {LegEvent.OPEN, LegEvent.END}
    alive = set(LegStage) - {LegStage.OVER}
    assert {pair for pair in DECODE_LEG_TABLE.missing() if pair[1] in from_the_world and pair[0] in alive} == set()
    ended = [pair for pair in SEQUENCE_TABLE.missing() if pair[1] is SequenceEvent.END]
    assert ended == [(SequenceState.OVER, SequenceEvent.END)]


KINDS = ["submit", "open", "receive", "fail", "early", "cancel", "cancel some", "plan", "done"]
EVENT = st.tuples(st.integers(0, 4), st.sampled_from(KINDS), st.integers(1, 7))
SIZES = (1, 2, 1, 3, 2)
"""Sequences of each leg."""


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENT, max_size=70), st.integers(8, 16))
def test_any_order_of_events_keeps_the_books(  # long: one world of events, read top-down
    events: list[tuple[int, str, int]], blocks: int
) -> None:
    """Failure classes 3, 7 and 11: nothing raises, every leg is released once, and while work remains some of it advances."""
    target = scheduler(blocks=blocks)
    submitted: set[int] = set()
    granted: set[int] = set()
    over: set[int] = set()
    cancelled: set[int] = set()
    released: list[int] = []
    running: StepPlan | None = None

    def take(instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, GrantTransfer):
                granted.add(instruction.leg.session.session_id)
            if isinstance(instruction, CancelTransfer):
                cancelled.add(instruction.transfer_id[7])
            if isinstance(instruction, ReportRelease):
                released.append(instruction.leg.session.session_id)

    def finish_step() -> None:
        nonlocal running
        if running is not None:
            take(target.step_done(running, [answer()] * len(running.sequences), 0.1, 1.0))
        running = None

    def close(number: int) -> None:
        over.add(number)
        take(target.transfer_closed(transfer(number), 1.0))

    for number, event, some in events:
        indexes = [index for index in range(SIZES[number]) if some >> index & 1]
        if event == "submit" and number not in submitted:
            submitted.add(number)
            leg_of = work(number, prompt=3 + 3 * number, max_tokens=6, sequences=SIZES[number])
            take(target.submit(leg_of, 0.0))
        elif event == "plan" and running is None:
            running, told = target.plan(1.0)
            take(told)
        elif event == "done":
            finish_step()
        elif event == "cancel":
            take(target.cancel(leg(number), LegOutcome.CANCELLED, "client", 1.0))
        elif event == "cancel some":
            take(target.cancel_sequences(leg(number), frozenset(indexes), "stop", 1.0))
        elif number in submitted - over:
            if event == "open":
                take(target.opened(transfer(number), 1.0))
            elif event == "receive" and number in granted:
                tokens = [replace(FIRST, sequence=index) for index in indexes or [0]]
                take(target.received(transfer(number), tuple(tokens), 0.0, 0.0, 1.0))
                close(number)
            elif event == "fail":
                take(target.transfer_failed(transfer(number), "nack", "", busy=False, now_s=1.0))
                close(number)
            elif event == "early":
                take(target.finished_early(transfer(number), 1.0))
                close(number)
        for late in cancelled - over:
            close(late)
        target.check_invariants()
    finish_step()
    for _ in range(40):
        ran, told = step(target)
        take(told)
        for late in cancelled - over:
            close(late)
        if not ran and not told:
            break
    assert target.count(SequenceState.RUNNING, SequenceState.READY) == 0, "adopted sequences always come to an end"
    for number in sorted(submitted):
        take(target.cancel(leg(number), LegOutcome.CANCELLED, "client", 2.0))
        take(target.transfer_closed(transfer(number), 2.0))
    assert sorted(released) == sorted(submitted)
    target.check_invariants()
    assert target._pool.num_free == blocks
