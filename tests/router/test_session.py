"""The session machine: lists of events and expected instructions, then exhaustive exploration (failure classes 3, 10, 22)."""

from collections.abc import Callable

import pytest

from pdserve.core.build import Role
from pdserve.core.errors import AttemptsExhausted, DeadlineExceeded, InvalidRequest, Overloaded, SlowReader
from pdserve.core.work import FinishReason, LegOutcome, SampledToken
from pdserve.router.events import Aborted, ClientLeft, FirstToken, PlacementRefused, Tick, Tokens
from pdserve.router.instructions import (
    Answer,
    CancelLeg,
    Close,
    Deliver,
    Fail,
    Finish,
    Instruction,
    LegAbandoned,
    Submit,
)
from pdserve.router.lifecycle import SESSION_TABLE, SessionState
from pdserve.router.patience import Patience, SessionLimits
from pdserve.router.session import RELEASE_WAIT_S, SUMMARY_GRACE_S
from tests.router.session_world import EOS, IDS, NODES, World

P, D = NODES[Role.PREFILL][0], NODES[Role.DECODE][0]


def kinds(instructions: list[Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


def only(instructions: list[Instruction], kind: type[Instruction]) -> Instruction:
    found = [instruction for instruction in instructions if isinstance(instruction, kind)]
    assert len(found) == 1, kinds(instructions)
    return found[0]


def failure(instructions: list[Instruction]) -> Fail:
    found = only(instructions, Fail)
    assert isinstance(found, Fail)
    return found


def answer(world: World) -> Answer:
    found = only(world.log, Answer)
    assert isinstance(found, Answer)
    return found


def test_the_table_answers_every_event_in_every_state() -> None:
    assert SESSION_TABLE.missing() == []


def test_the_plain_walk() -> None:
    world = World(max_tokens=3)
    steps = [
        (world.place, ["Submit"], SessionState.PREFILLING),
        (world.first, ["Deliver"], SessionState.HANDING_OVER),  # the first token never waits for the transfer
        (world.adopted, [], SessionState.DECODING),
    ]
    for step, instructions, state in steps:
        assert (kinds(step()), world.session.state) == (instructions, state)
    assert kinds(world.tokens(1)) == ["Deliver"]
    world.ended("P", LegOutcome.FINISHED)
    world.released("P")
    assert kinds(world.tokens(2)) == ["Deliver", "Finish"]
    world.ended("D", LegOutcome.FINISHED)
    assert kinds(world.released("D")) == ["Answer", "Close"]
    end = answer(world)
    assert (end.num_prompt_tokens, end.num_cached_tokens, end.num_completion_tokens) == (3, 2, 3)
    assert world.text == "abc"


def test_the_first_token_may_come_with_adopted_and_the_copies_are_one() -> None:
    world = World()
    world.place()
    assert kinds(world.adopted()) == ["Deliver"]
    assert world.first() == []
    assert world.session.sequences[0].num_duplicates == 1


def test_tokens_before_the_word_adopted_pass_the_commit_point() -> None:
    """Tokens of a step are read before its events; a lost prefill node does not matter to them."""
    world = World()
    world.place()
    assert world.tokens(1) == []
    assert world.session.state is SessionState.DECODING
    assert world.lost("P") == []
    only(world.adopted(), Deliver)
    assert world.shown_ids == list(IDS[:2])


def test_one_token_opens_no_transfer() -> None:
    world = World(max_tokens=1)
    submit = only(world.place(), Submit)
    assert isinstance(submit, Submit)
    assert submit.decode is None
    assert submit.transfer_id is None
    assert kinds(world.first()) == ["Deliver", "Finish"]
    world.ended("P", LegOutcome.FINISHED)
    assert kinds(world.released("P")) == ["Answer", "Close"]


def test_one_remaining_token_of_a_resume_opens_no_transfer() -> None:
    world = World(max_tokens=2)
    world.place()
    world.first()
    world.lost("D")
    submit = only(world.place(), Submit)
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.decode, submit.output_ids) == (2, None, IDS[:1])


def test_eos_as_first_token_ends_without_decode() -> None:
    world = World(max_tokens=3, ids=(EOS, *IDS))
    world.place()
    stop = SampledToken(0, EOS, -0.5, FinishReason.STOP)
    out = world.tell(FirstToken(P, 1, (stop,), 0, {}))
    assert kinds(out) == ["Deliver", "Finish"], "the prefill node itself ends the transfer"
    assert world.text == ""
    world.ended("D", LegOutcome.FINISHED)
    world.released("D")
    world.ended("P", LegOutcome.FINISHED)
    assert kinds(world.released("P")) == ["Answer", "Close"]


def test_an_end_whose_report_was_lost_is_seen_by_the_router_itself() -> None:
    """An answer that is complete is finished, never resumed."""
    world = World(max_tokens=3, ids=(IDS[0], EOS, *IDS))
    world.place()
    world.adopted()
    out = world.tell(Tokens(D, 1, (SampledToken(1, EOS, -0.5, None),)))
    assert kinds(out)[:2] == ["Deliver", "Finish"]
    assert kinds(out)[2:] == ["CancelLeg", "CancelLeg"]
    assert "AskPlacement" not in kinds(world.lost("D"))


def test_a_stop_text_cancels_both_legs_and_is_not_counted() -> None:
    world = World(max_tokens=8, stops=("cd",))
    world.place()
    world.first()
    world.adopted()
    world.tokens(1)
    assert world.tokens(2) == [], "c may begin the stop: held"
    out = world.tokens(3)
    finish = only(out, Finish)
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.stop) == (FinishReason.STOP_SEQUENCE, "cd")
    assert [entry.node for entry in out if isinstance(entry, CancelLeg)] == [P, D]
    assert world.tokens(4) == [], "what came after is not shown"
    world.released("P")
    world.released("D")
    assert (world.text, answer(world).num_completion_tokens) == ("ab", 2)


@pytest.mark.parametrize("who", ["P", "D"])
@pytest.mark.parametrize("outcome", [LegOutcome.FAILED, LegOutcome.CANCELLED, LegOutcome.EVICTED, LegOutcome.DRAINED])
@pytest.mark.parametrize("has_first", [False, True])
def test_before_adopted_either_leg_ends_the_attempt_on_both_nodes(
    who: str, outcome: LegOutcome, has_first: bool
) -> None:
    world = World()
    world.place()
    if has_first:
        world.first()
    out = world.ended(who, outcome)
    other = D if who == "P" else P
    assert [entry.node for entry in out if isinstance(entry, CancelLeg)] == [other]
    assert kinds(out)[-1] == "AskPlacement"
    submit = only(world.place(), Submit)
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.output_ids) == (2, IDS[:has_first])
    assert world.adopted(attempt=1) == [], "old attempts are ignored"
    world.adopted(attempt=2)
    world.tokens(*range(has_first + 1, 3), attempt=2)
    assert world.shown_ids == list(IDS[:3])


def test_after_adopted_only_the_decode_leg_matters() -> None:
    world = World()
    world.place()
    world.first()
    world.adopted()
    assert world.ended("P", LegOutcome.FAILED) == []
    assert world.lost("P") == []
    out = world.lost("D")
    assert kinds(out) == ["AskPlacement"]
    assert world.asked is not None
    assert (world.asked.is_resume, world.asked.prefer, world.asked.num_tokens) == (True, D, 4)


def test_the_next_attempt_avoids_the_nodes_of_a_failed_one() -> None:
    """Before adoption either node may be to blame, after it only the decode node; who is merely busy is not."""
    before, after, busy = World(), World(), World()
    for world in (before, after, busy):
        world.place()
        world.first()
    before.ended("P", LegOutcome.FAILED)
    after.adopted()
    after.ended("D", LegOutcome.FAILED)
    busy.ended("D", LegOutcome.BUSY)
    asked = [world.asked.avoid for world in (before, after, busy) if world.asked is not None]
    assert asked == [frozenset({P, D}), frozenset({D}), frozenset()]


def test_a_session_that_takes_over_sequences_avoids_the_same_nodes() -> None:
    patience = Patience(SessionLimits(3, queue_wait_s=60.0, resume_wait_s=30.0), 0.0)
    patience.attempt_ended(LegOutcome.FAILED, "scripted", 1.0, "", frozenset({P}))
    assert patience.fork().avoided == {P}


def test_a_prefill_node_that_did_its_part_may_die_before_adopted_arrives() -> None:
    world = World()
    world.place()
    world.first()
    world.ended("P", LegOutcome.FINISHED)
    assert world.lost("P") == []
    world.adopted()
    assert world.session.attempt == 1


def test_only_failures_count_towards_the_bound() -> None:
    world = World(max_attempts=2)
    for attempt in range(1, 6):
        world.place()
        world.ended("D", LegOutcome.BUSY, attempt)
        world.released("D", attempt)
        world.released("P", attempt)
    world.place()
    world.lost("D", 6)
    world.released("P", 6)
    world.place()
    error = failure(world.lost("D", 7)).error
    assert isinstance(error, AttemptsExhausted)
    assert error.metadata["num_tokens_sent"] == "0"
    assert kinds(world.released("P", 7)) == ["Close"]


def test_pauses_are_paced_and_bounded_in_time() -> None:
    world = World(deadline_s=None)
    waits = []
    while not world.is_over:
        world.place()
        world.ended("D", LegOutcome.BUSY, world.session.attempt)
        world.released("D", world.session.attempt)
        world.released("P", world.session.attempt)
        assert world.asked is not None
        waits.append(world.asked.not_before_s - world.now_s)
        timer = world.session.next_timer_s
        assert timer is not None
        world.now_s = min(timer, world.now_s + 10.0)
        world.tell(Tick())
    assert waits[:3] == pytest.approx([0.05, 0.1, 0.2])
    assert max(waits) <= 1.0
    assert isinstance(failure(world.log).error, Overloaded)
    assert world.now_s == pytest.approx(60.0)


def test_a_refusal_is_final_when_nobody_else_can_serve() -> None:
    world = World()
    world.place()
    world.ended("D", LegOutcome.REFUSED)
    assert world.asked is not None
    assert world.asked.exclude == {D}
    error = failure(world.tell(PlacementRefused(Overloaded("nobody")))).error
    assert isinstance(error, InvalidRequest)
    assert "because" in error.message


def test_no_node_to_take_over_says_how_many_tokens_were_sent() -> None:
    world = World(max_tokens=8)
    world.place()
    world.adopted()
    world.tokens(1, 2)
    world.lost("D")
    world.released("P")
    world.now_s += 30.0
    error = failure(world.tell(Tick())).error
    assert isinstance(error, AttemptsExhausted)
    assert error.metadata["num_tokens_sent"] == "3"
    assert world.is_closed


@pytest.mark.parametrize("stage", range(5))
def test_a_cancel_at_any_stage_reaches_both_nodes(stage: int) -> None:
    world = World()
    walk: list[Callable[[], list[Instruction]]] = [world.place, world.first, world.adopted, lambda: world.tokens(1)]
    for step in walk[:stage]:
        step()
    out = world.tell(ClientLeft())
    assert [entry.node for entry in out if isinstance(entry, CancelLeg)] == ([P, D] if stage else [])
    assert world.is_closed == (stage == 0)
    if stage:
        world.released("P")
        world.ended("D", LegOutcome.CANCELLED)
        assert kinds(world.released("D")) == ["Close"]
    assert world.session.state is SessionState.CANCELLED


def test_the_deadline_ends_with_its_own_error() -> None:
    world = World(deadline_s=5.0)
    world.place()
    world.now_s = 4.9
    assert isinstance(failure(world.ended("P", LegOutcome.CANCELLED)).error, DeadlineExceeded)
    other = World(deadline_s=5.0)
    other.place()
    assert other.session.next_timer_s == 5.0
    other.now_s = 5.0
    assert isinstance(failure(other.tell(Tick())).error, DeadlineExceeded)


def test_a_slow_reader_is_cancelled_on_both_nodes() -> None:
    world = World()
    world.place()
    out = world.tell(Aborted(SlowReader("slow")))
    assert kinds(out) == ["WithdrawPlacement", "CancelLeg", "CancelLeg", "Fail"]


def test_the_summary_waits_for_the_nodes_durations_only_for_the_grace() -> None:
    world = World(max_tokens=2)
    world.place()
    world.adopted()
    assert kinds(world.tokens(1)) == ["Deliver", "Finish"]
    assert world.session.next_timer_s == pytest.approx(world.now_s + SUMMARY_GRACE_S)
    world.now_s += SUMMARY_GRACE_S
    assert kinds(world.tell(Tick())) == ["Answer"]
    world.released("P")
    assert kinds(world.released("D")) == ["Close"]


def test_a_leg_that_is_never_released_is_abandoned_in_the_end() -> None:
    world = World()
    world.place()
    world.tell(ClientLeft())
    assert world.session.next_timer_s == pytest.approx(world.now_s + RELEASE_WAIT_S)
    world.now_s += RELEASE_WAIT_S
    out = world.session.handle(Tick(), world.now_s)
    assert [entry.node for entry in out if isinstance(entry, LegAbandoned)] == [P, D]
    assert isinstance(out[-1], Close)


def test_legs_that_vanish_without_a_word_do_not_hang_the_client() -> None:
    world = World()
    world.place()
    world.ended("D", LegOutcome.FINISHED)
    world.released("D")
    world.ended("P", LegOutcome.FINISHED)
    assert kinds(world.released("P")) == ["AskPlacement"]
