"""Placement, admission, the waiting line and the ledger: pure parts, as tables (failure classes 8, 24, 28)."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.errors import Draining, InvalidRequest, NoNodes, Overloaded
from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation
from pdserve.router.admission import MAX_RETRY_S, Admission, WaitingLine
from pdserve.router.instructions import PlacementQuery
from pdserve.router.lease import Lease
from pdserve.router.nodes import Hello, NodeLedger, NodeLoad, Status
from pdserve.router.placement import Busy, LeastLoaded, Pair, Unplaceable, length_limits, place

CAPABILITIES = Capabilities("float32", "float32", ("float32",))


def node(name: str, role: Role, **changes: Any) -> NodeLoad:
    load = NodeLoad(
        incarnation=Incarnation(name.encode().ljust(16, b"-")),
        role=role,
        identity="same",
        capabilities=CAPABILITIES,
        block_size=16,
        max_model_len=1000,
        num_waiting=0,
        num_running=0,
        num_waiting_tokens=0,
        num_free_blocks=100,
    )
    return replace(load, **changes)


def query(**changes: Any) -> PlacementQuery:
    asked = PlacementQuery(
        session_id=1,
        num_tokens=10,
        max_len=50,
        needs_decode=True,
        is_resume=False,
        arrived_s=0.0,
        not_before_s=0.0,
    )
    return replace(asked, **changes)


P1, P2 = node("P1", Role.PREFILL), node("P2", Role.PREFILL)
D1, D2 = node("D1", Role.DECODE), node("D2", Role.DECODE)
POLICY = LeastLoaded(max_waiting=4)


def placed(asked: PlacementQuery, *nodes: NodeLoad) -> tuple[str, str]:
    found = place(asked, nodes, POLICY)
    assert isinstance(found, Pair)
    names = [b"" if name is None else name.rstrip(b"-") for name in (found.prefill, found.decode)]
    return names[0].decode(), names[1].decode()


def test_the_least_loaded_pair_is_chosen() -> None:
    busy_p, busy_d = replace(P1, num_waiting_tokens=500), replace(D1, num_running=3)
    assert placed(query(), busy_p, P2, busy_d, D2) == ("P2", "D2")


def test_nodes_that_failed_the_session_come_last_but_may_be_taken() -> None:
    """Failure classes 23 and 27: a node that fails at once is the least loaded, and must not get every attempt."""
    busy = (replace(P2, num_waiting_tokens=500), replace(D2, num_running=3, num_free_blocks=0))
    avoid = frozenset({P1.incarnation, D1.incarnation})
    assert placed(query(avoid=avoid), P1, busy[0], D1, busy[1]) == ("P2", "D2")
    assert placed(query(avoid=avoid), P1, D1, busy[1]) == ("P1", "D2")
    assert placed(query(avoid=avoid), P1, D1) == ("P1", "D1")
    alone = place(query(avoid=avoid, needs_decode=False), (P1, busy[0]), POLICY)
    assert alone == Pair(P2.incarnation, None, "same")


def test_a_decode_node_with_room_comes_before_an_idle_one_without() -> None:
    assert placed(query(num_tokens=100), P1, replace(D1, num_free_blocks=6), replace(D2, num_running=5)) == ("P1", "D2")


def test_a_pair_that_has_shaken_hands_comes_first() -> None:
    knows_d2 = replace(P1, connected_peers=frozenset({D2.incarnation}))
    assert placed(query(), knows_d2, D1, replace(D2, num_running=3)) == ("P1", "D2")


def test_a_saturated_pair_with_a_link_is_waited_for_rather_than_one_without() -> None:
    """A pair without a link would only wait for a handshake that may never come, and count as a failure."""
    knows_d2 = replace(P1, connected_peers=frozenset({D2.incarnation}))
    assert place(query(), [knows_d2, D1, replace(D2, num_waiting=4)], POLICY) == Busy()


def test_a_resume_goes_back_to_the_node_that_holds_its_kv() -> None:
    assert placed(query(prefer=D1.incarnation), P1, replace(D1, num_running=3), D2) == ("P1", "D1")
    assert placed(query(prefer=D1.incarnation), P1, D2) == ("P1", "D2")


def test_only_equal_identities_are_paired_and_a_session_stays_with_its_own() -> None:
    old_p, old_d = replace(P1, identity="old"), replace(D1, identity="old")
    assert placed(query(identity="old"), old_p, P2, old_d, D2) == ("P1", "D1")
    found = place(query(), [old_p, D2], POLICY)
    assert isinstance(found, Unplaceable)
    assert isinstance(found.error, NoNodes)
    other = Capabilities("bfloat16", "bfloat16", ("bfloat16",))
    assert isinstance(place(query(), [P1, replace(D1, capabilities=other)], POLICY), Unplaceable)


def test_one_token_needs_no_decode_node() -> None:
    assert placed(query(needs_decode=False), P1) == ("P1", "")


def test_saturated_nodes_make_it_wait() -> None:
    full = replace(P1, num_waiting=4)
    assert isinstance(place(query(), [full, D1], POLICY), Busy)
    assert placed(query(), full, P2, D1) == ("P2", "D1")


@pytest.mark.parametrize("doubted", ["P1", "D1"])
def test_a_node_in_doubt_gets_nothing_and_nobody_is_refused_for_it(doubted: str) -> None:
    """Failure class 23: the doubt passes, so the request waits."""
    nodes = [replace(node, is_doubtful=node.incarnation.rstrip(b"-").decode() == doubted) for node in (P1, D1)]
    assert isinstance(place(query(), nodes, POLICY), Busy)
    assert isinstance(place(query(is_resume=True), nodes, POLICY), Busy)
    busy = [replace(node, num_waiting=3, num_waiting_tokens=900) for node in (P2, D2)]
    assert placed(query(prefer=D1.incarnation), *nodes, *busy)[0 if doubted == "P1" else 1] == doubted.replace("1", "2")


def test_an_empty_pool_is_named_and_not_final() -> None:
    for nodes, missing in (([D1], "prefill"), ([P1], "decode"), ([], "prefill")):
        found = place(query(), nodes, POLICY)
        assert isinstance(found, Unplaceable)
        assert isinstance(found.error, NoNodes)
        assert missing in found.error.message
        assert not found.is_final


def test_what_no_node_can_hold_is_refused_for_good() -> None:
    found = place(query(max_len=1001), [P1, D1], POLICY)
    assert isinstance(found, Unplaceable)
    assert isinstance(found.error, InvalidRequest)
    assert found.is_final
    excluded = place(query(exclude=frozenset({D1.incarnation})), [P1, D1], POLICY)
    assert isinstance(excluded, Unplaceable)
    assert excluded.is_final


def test_length_limits_of_unequal_nodes() -> None:
    limits = length_limits([P1, replace(D1, max_model_len=64), D2])
    assert limits is not None
    assert (limits.common, limits.longest) == (64, 1000)
    assert length_limits([P1]) is None
    assert length_limits([P1, replace(D1, identity="other")]) is None


def hello(role: Role = Role.PREFILL) -> Hello:
    process = ProcessInfo(role, Incarnation(b"n" * 16), "1", "c", block_size=16)
    return Hello(process, Identity("w", "A"), CAPABILITIES, (), 64, 1000, 3.0, frozenset({2}))


def test_the_ledger_counts_what_the_node_has_not_reported_yet() -> None:
    ledger = NodeLedger()
    status = Status(num_waiting=1, num_waiting_tokens=100, num_free_blocks=50)
    ledger.place((1, 1), 40)
    load = ledger.load(hello(), status)
    assert (load.num_waiting, load.num_waiting_tokens, load.num_free_blocks) == (2, 140, 48)
    ledger.reported()
    load = ledger.load(hello(), status)
    assert (load.num_waiting, load.num_waiting_tokens) == (1, 100), "never counted twice"
    load = ledger.load(hello(), Status())
    assert (load.num_waiting, load.num_waiting_tokens) == (1, 40), "a report that crossed the submit hides nothing"
    ledger.started((1, 1))
    ledger.started((1, 1))
    load = ledger.load(hello(), Status())
    assert (load.num_waiting, load.num_running) == (0, 1), "a report from before the start does not show it as idle"
    assert ledger.load(hello(), Status(num_running=3)).num_running == 3
    ledger.over((1, 1))
    ledger.started((1, 1))
    ledger.over((1, 1))
    load = ledger.load(hello(), Status())
    assert (load.num_waiting, load.num_running) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(["place", "start", "end", "report"]), st.integers(0, 5)), max_size=40))
def test_the_ledger_is_never_below_what_is_there_and_empties(steps: list[tuple[str, int]]) -> None:
    ledger, waiting, running, ids = NodeLedger(), set(), set(), itertools.count()
    current: dict[int, tuple[int, int]] = {}
    for step, leg in steps:
        if step == "place":
            current[leg] = (leg, next(ids))
            ledger.place(current[leg], 10)
            waiting.add(current[leg])
        elif step == "start" and leg in current:
            ledger.started(current[leg])
            running |= waiting & {current[leg]}
            waiting.discard(current[leg])
        elif step == "end" and leg in current:
            ledger.over(current[leg])
            waiting.discard(current[leg])
            running.discard(current[leg])
        else:
            ledger.reported()
        load = ledger.load(hello(), Status())
        assert (ledger.num_outstanding, ledger.num_running) == (len(waiting), len(running))
        assert load.num_waiting >= len(waiting)
        assert load.num_running == len(running)
        assert load.num_waiting_tokens >= 10 * len(waiting)
    for placed in waiting | running:
        ledger.over(placed)
    ledger.reported()
    assert (ledger.num_outstanding, ledger.num_running, ledger.load(hello(), Status()).num_waiting_tokens) == (0, 0, 0)


def test_admission_is_bounded_and_says_when_to_come_back() -> None:
    admission = Admission(max_sessions=2, max_queue=1)
    admission.admit(0)
    with pytest.raises(Overloaded) as caught:
        admission.admit(1)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= MAX_RETRY_S
    admission.admit(0)
    with pytest.raises(Overloaded):
        admission.admit(0)
    assert admission.num_refused == 2
    admission.leave(1.0)
    admission.admit(0)
    admission.is_draining = True
    with pytest.raises(Draining):
        admission.admit(0)
    admission.leave(2.0)
    admission.leave(3.0)
    with pytest.raises(ValueError, match="more requests left"):
        admission.leave(4.0)


def test_admission_counts_answers_and_lets_a_large_request_in_alone() -> None:
    admission = Admission(max_sessions=4, max_queue=1)
    admission.admit(0, 3)
    with pytest.raises(Overloaded):
        admission.admit(0, 2)
    admission.admit(0)
    admission.leave(1.0, 3)
    admission.leave(2.0)
    admission.admit(0, 64)
    assert admission.num_open == 64
    with pytest.raises(Overloaded):
        admission.admit(0)
    with pytest.raises(ValueError, match="more requests left"):
        admission.leave(3.0, 65)


def test_answers_to_one_prompt_go_where_all_of_them_fit() -> None:
    """They share the prompt's full blocks: 2 of 16 tokens; 50 tokens each take 2 more per answer."""
    small, large = replace(D1, num_blocks=9), replace(D2, num_blocks=10, num_running=9)
    asked = query(num_tokens=40, max_len=50, num_sequences=4)
    assert placed(asked, P1, small, large) == ("P1", "D2")
    assert placed(replace(asked, num_sequences=3), P1, small, large) == ("P1", "D1")
    assert placed(replace(asked, num_sequences=1), P1, replace(small, num_blocks=1), large) == ("P1", "D1")
    assert isinstance(place(asked, [P1, small], POLICY), Unplaceable)


def test_room_is_looked_for_all_answers() -> None:
    """Each of them needs a block of its own at once, besides the two full ones that they share."""
    tight, roomy = (
        replace(D1, num_blocks=50, num_free_blocks=5),
        replace(D2, num_blocks=50, num_free_blocks=6, num_running=9),
    )
    asked = query(num_tokens=40, max_len=50, num_sequences=4)
    assert placed(asked, P1, tight, roomy) == ("P1", "D2")
    assert placed(replace(asked, num_sequences=3), P1, tight, roomy) == ("P1", "D1")


def test_the_line_keeps_resumes_ahead_and_each_by_age() -> None:
    line = WaitingLine()
    line.join(query(session_id=1, arrived_s=3.0))
    line.join(query(session_id=2, arrived_s=1.0))
    line.join(query(session_id=3, arrived_s=9.0, is_resume=True))
    line.join(query(session_id=4, arrived_s=0.0, not_before_s=5.0))
    assert [asked.session_id for asked in line.due(4.0, 9)] == [3, 2, 1]
    assert line.next_due_s(4.0) == 5.0
    assert [asked.session_id for asked in line.due(5.0, 9)] == [3, 4, 2, 1]
    assert (len(line), line.num_new) == (4, 3)
    line.leave(3)
    line.leave(3)
    assert (len(line), line.next_due_s(5.0)) == (3, None)


def test_a_lease_expires_by_silence_and_not_by_our_own_lateness() -> None:
    lease = Lease(3.0, 0.5, 0.0)
    assert not lease.is_expired(0.5)
    lease.heard(1.0)
    assert not lease.is_expired(1.0)
    assert not lease.is_expired(5.0), "this process slept 3.5 s longer than it meant to"
    times = [5.5, 6.0, 6.5, 7.0, 7.5]
    assert [lease.is_expired(time_s) for time_s in times] == [False, False, False, False, True]


def test_resumes_are_paced_and_new_work_goes_on() -> None:
    """The loss of a full node must not put all of its sessions before everyone else at once."""
    line = WaitingLine()
    for number in range(6):
        line.join(query(session_id=number, is_resume=number < 4, arrived_s=float(number)))
    assert [asked.session_id for asked in line.due(0.0, 2)] == [0, 1, 4, 5]
    assert [asked.session_id for asked in line.due(0.0, 0)] == [4, 5]
    assert [asked.session_id for asked in line.due(0.0, -3)] == [4, 5]


def test_an_idle_hour_does_not_lengthen_the_advice_to_retry() -> None:
    admission = Admission(max_sessions=1, max_queue=1)
    for now_s in (0.0, 3600.0, 7200.0):
        admission.admit(0)
        admission.leave(now_s)
    admission.admit(0)
    with pytest.raises(Overloaded) as raised:
        admission.admit(0)
    assert raised.value.retry_after_s is not None
    assert raised.value.retry_after_s < 1.0
