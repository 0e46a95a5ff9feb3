"""Transfers through both machines: the good way, every end at every stage, order and fairness, window, deadlines."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import pytest

from pdserve.core.ids import TransferId, new_incarnation
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.lifecycle import TransitionTable
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import Acked, Received, ReceiveFailed, SendFailed
from pdserve.kvtransfer.messages import (
    Abort,
    Ack,
    Commit,
    Data,
    Gone,
    GoneKind,
    Grant,
    Hello,
    Message,
    Nack,
    NackReason,
    Open,
)
from pdserve.kvtransfer.receiver import RECEIVE_TABLE
from pdserve.kvtransfer.receiver_link import RECEIVER_LINK_TABLE
from pdserve.kvtransfer.sender import SEND_TABLE
from pdserve.kvtransfer.sender_link import SENDER_LINK_TABLE
from pdserve.kvtransfer.wire import checksum
from tests.kvtransfer.nodes import FIRST, LAYOUT, kv_bytes, settings
from tests.kvtransfer.world import World

TABLES = [SEND_TABLE, RECEIVE_TABLE, SENDER_LINK_TABLE, RECEIVER_LINK_TABLE]
ROW = KvLayout((LayerLayout(4, 64, 64),) * 4, "float32")
"""2 KiB per token and layer: 128 tokens fill a frame."""


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_answer_every_event_in_every_state(table: TransitionTable) -> None:  # type: ignore[type-arg]  # four kinds
    assert table.missing() == []
    assert not [key for key in table.moves if key[0] in table.terminal], "nothing leaves an end"
    reached = {table.initial}
    while more := {after for (before, _), after in table.moves.items() if before in reached} - reached:
        reached |= more
    states: type[Enum] = type(table.initial)
    assert reached == set(states), "every state can be reached"
    for state in reached - table.terminal:
        assert any(before is state and after is not state for (before, _), after in table.moves.items()), (
            f"{state} is a trap"
        )


def failure(world: World, transfer_id: TransferId) -> str:
    """Why the sender's transfer failed."""
    return next(e.reason for e in world.sent if isinstance(e, SendFailed) and e.transfer_id == transfer_id)


def loss(world: World, transfer_id: TransferId) -> str:
    """Why the receiver's transfer failed."""
    return next(e.reason for e in world.received if isinstance(e, ReceiveFailed) and e.transfer_id == transfer_id)


class TestGoodWay:
    def test_all_bytes_arrive_and_both_sides_close(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.send_all(transfer_id)
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
        assert world.received_kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]
        world.sink.check(transfer_id, 20)
        received = next(event for event in world.received if isinstance(event, Received))
        assert received.tokens == FIRST
        assert received.stats.kv_bytes == LAYOUT.range_bytes(range(4), 20)
        world.assert_nothing_left()

    def test_layers_are_sent_while_later_layers_compute(self) -> None:
        world = World(settings(layout=ROW), settings(layout=ROW)).meet()
        transfer_id = world.open(128)
        world.mark(transfer_id, range(1), range(128))
        assert len(world.said(">", Data)) == 1, "layer 0 is under way before layer 1 was computed"

    def test_marks_before_the_grant_wait_for_it(self) -> None:
        world = World().meet()
        transfer_id = world.open(grant=False)
        world.send_all(transfer_id)
        assert world.said(">", Data) == []
        world.receiver.grant(transfer_id, 0, world.now_s)
        world.settle()
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
        world.sink.check(transfer_id, 20)

    def test_skipped_tokens_do_not_travel(self) -> None:
        world = World().meet()
        transfer_id = world.open(20, skip_tokens=16)
        world.send_all(transfer_id)
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
        assert {token for _, token in world.sink.placed[transfer_id]} == set(range(16, 20))

    def test_tokens_may_come_in_any_order(self) -> None:
        world = World().meet()
        transfer_id = world.open(20)
        for tokens in (range(12, 20), range(5), range(5, 12)):
            for layers in (range(2, 4), range(2)):
                world.mark(transfer_id, layers, tokens)
        world.commit(transfer_id)
        assert world.received_kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]
        world.sink.check(transfer_id, 20)

    def test_exposed_time_runs_from_commit_to_ack(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Ack) else [frames]
        world.send_all(transfer_id)
        world.fault = lambda *args: [args[3]]
        world.advance(world.mine.lease_s)
        acked = next(event for event in world.sent if isinstance(event, Acked))
        assert acked.stats.exposed_s == pytest.approx(world.mine.lease_s)


class TestRepeats:
    def test_a_repeated_open_gets_the_grant_again(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        (said,) = world.said(">", Open)
        world.receiver.message(next(iter(world.alive)), said, memoryview(b""), world.now_s)
        world.settle()
        assert world.said("<", Grant) == [Grant(transfer_id), Grant(transfer_id)]
        assert world.sent_kinds(transfer_id) == ["Granted"]

    def test_a_repeated_commit_gets_the_ack_again(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.send_all(transfer_id)
        (said,) = world.said(">", Commit)
        for again in (said, world.said(">", Open)[0]):
            world.receiver.message(next(iter(world.alive)), again, memoryview(b""), world.now_s)
        world.settle()
        assert world.said("<", Ack) == [Ack(transfer_id)] * 3
        assert world.received_kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]

    @pytest.mark.parametrize("lost", [Open, Grant, Commit, Ack])
    def test_a_lost_control_message_is_said_again(self, lost: type[Message]) -> None:
        world = World().meet()
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, lost) else [frames]
        transfer_id = world.open()
        world.send_all(transfer_id)
        world.fault = lambda *args: [args[3]]
        world.advance(world.mine.lease_s + 0.3)
        if lost is Open:
            world.receiver.grant(transfer_id, 0, world.now_s)
            world.settle()
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
        assert world.received_kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]

    def test_a_submit_of_an_id_that_is_over_fails_at_once(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.send_all(transfer_id)
        _, theirs = world.specs()
        world.receiver.expect(replace(theirs, transfer_id=transfer_id), world.now_s)
        world.settle()
        assert world.received_kinds(transfer_id)[-2:] == ["ReceiveFailed", "ReceiveClosed"]

    def test_repeated_submits_and_opens_of_a_live_id_change_nothing(self) -> None:
        world = World().meet()
        mine, theirs = world.specs()
        for _ in range(2):
            world.receiver.expect(theirs, world.now_s)
            world.sender.open(mine, world.now_s)
        world.settle()
        assert world.received_kinds(mine.transfer_id) == ["Opened"]


class TestSubmit:
    def test_only_a_submit_creates_a_transfer(self) -> None:
        world = World().meet()
        mine, _ = world.specs()
        world.sender.open(mine, world.now_s)
        world.settle()
        assert world.receiver.gauges()["kv_parked_opens"] == 1
        assert world.receiver.gauges()["kv_transfers"] == 0
        world.advance(world.theirs.park_s + 0.3)
        assert world.said("<", Gone) == [Gone(mine.transfer_id, GoneKind.UNKNOWN)]
        assert failure(world, mine.transfer_id) == "gone_unknown"
        world.assert_nothing_left()

    def test_a_submit_that_was_overtaken_finds_the_parked_open(self) -> None:
        world = World().meet()
        mine, theirs = world.specs()
        world.sender.open(mine, world.now_s)
        world.advance(1.0)
        world.receiver.expect(theirs, world.now_s)
        world.settle()
        assert world.received_kinds(mine.transfer_id) == ["Opened"]
        world.receiver.grant(mine.transfer_id, 0, world.now_s)
        world.send_all(mine.transfer_id)
        assert world.received_kinds(mine.transfer_id) == ["Opened", "Received", "ReceiveClosed"]

    @pytest.mark.parametrize(("finished", "event"), [(True, "FinishedEarly"), (False, "ReceiveFailed")])
    def test_open_and_abort_that_overtook_the_submit(self, finished: bool, event: str) -> None:
        world = World().meet()
        mine, theirs = world.specs()
        world.sender.open(mine, world.now_s)
        world.settle()
        world.sender.abort(mine.transfer_id, "stop", finished, world.now_s)
        world.settle()
        world.receiver.expect(theirs, world.now_s)
        world.settle()
        assert world.received_kinds(mine.transfer_id) == ["Opened", event, "ReceiveClosed"]

    def test_parked_opens_are_bounded(self) -> None:
        world = World(theirs=settings(max_parked=2)).meet()
        for _ in range(3):
            world.sender.open(world.specs()[0], world.now_s)
        world.settle()
        assert world.receiver.gauges()["kv_parked_opens"] == 2
        assert len(world.said("<", Gone)) == 1

    def test_a_parked_open_goes_with_its_connection(self) -> None:
        world = World().meet()
        mine, theirs = world.specs()
        world.sender.open(mine, world.now_s)
        world.settle()
        world.cut()
        world.assert_nothing_left()
        world.receiver.expect(theirs, world.now_s)
        world.settle()
        assert world.received_kinds(mine.transfer_id) == []

    @pytest.mark.parametrize("field", ["attempt", "prompt_digest", "num_tokens"])
    def test_an_open_that_differs_from_its_submit_is_refused(self, field: str) -> None:
        world = World().meet()
        mine, theirs = world.specs()
        other = {"attempt": 2, "prompt_digest": b"x" * 32, "num_tokens": 21}[field]
        world.receiver.expect(replace(theirs, **{field: other}), world.now_s)  # type: ignore[arg-type]  # fields by name
        world.sender.open(mine, world.now_s)
        world.settle()
        assert failure(world, mine.transfer_id) == "kv_nack_mismatch"
        assert loss(world, mine.transfer_id) == "kv_nack_mismatch"
        world.assert_nothing_left()

    def test_a_transfer_waits_for_its_link(self) -> None:
        world = World()
        transfer_id = world.open(grant=False)
        assert world.sent_kinds(transfer_id) == []
        world.meet()
        assert world.received_kinds(transfer_id) == ["Opened"]

    def test_no_link_within_the_deadline(self) -> None:
        world = World()
        transfer_id = world.open(grant=False)
        world.advance(world.mine.connect_wait_s + 0.3)
        assert failure(world, transfer_id) == "no_link"


class TestWrongPeer:
    @pytest.fixture
    def world(self) -> World:
        """The usual pair, and a third node on its own connection."""
        world = World()
        other = new_incarnation()
        world.meet()
        world.receiver.set_peers(frozenset({world.mine.incarnation, other}), world.now_s)
        hello = Hello(other, world.theirs.incarnation, bytes(16), world.mine.offer)
        world.receiver.message(self.route, hello, memoryview(b""), world.now_s)
        world.settle()
        assert len(world.receiver.peers_up()) == 2
        return world

    route = Route(b"third")

    def test_its_frames_are_refused_and_change_nothing(self, world: World) -> None:
        transfer_id = world.open()
        payload = kv_bytes(transfer_id, 0, 0, LAYOUT)
        data = Data(transfer_id, 1, 0, range(1), range(1), "float32", len(payload), checksum(payload))
        frames: list[tuple[Message, bytes]] = [
            (Open(transfer_id, 1, bytes(32), 20), b""),
            (data, payload),
            (Commit(transfer_id, 1, 0, FIRST), b""),
            (Abort(transfer_id), b""),
        ]
        for message, content in frames:
            world.receiver.message(self.route, message, memoryview(content), world.now_s)
        world.settle()
        nacks = [message for message in world.said("<", Nack) if isinstance(message, Nack)]
        assert [nack.reason for nack in nacks] == [NackReason.PEER] * 4
        assert world.receiver.gauges()["kv_wrong_peer_total"] == 4
        assert transfer_id not in world.sink.placed
        world.send_all(transfer_id)
        assert world.received_kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]

    def test_it_cannot_open_what_another_was_submitted_for(self, world: World) -> None:
        _, theirs = world.specs()
        world.receiver.message(self.route, Open(theirs.transfer_id, 1, bytes(32), 20), memoryview(b""), world.now_s)
        world.receiver.expect(theirs, world.now_s)
        world.settle()
        assert world.received_kinds(theirs.transfer_id) == []
        assert [m.reason for m in world.said("<", Nack) if isinstance(m, Nack)] == [NackReason.PEER]

    def test_it_learns_nothing_of_what_is_over(self, world: World) -> None:
        transfer_id = world.open()
        world.send_all(transfer_id)
        world.receiver.message(self.route, Commit(transfer_id, 1, 2, FIRST), memoryview(b""), world.now_s)
        world.settle()
        assert world.said("<", Gone) == [Gone(transfer_id, GoneKind.UNKNOWN)]
        assert len(world.said("<", Ack)) == 1


def craft(**changes: object) -> Callable[[TransferId, int], tuple[Data, bytes]]:
    """A DATA frame of the first token of layer 0, with some of its header changed."""

    def make(transfer_id: TransferId, sequence: int) -> tuple[Data, bytes]:
        payload = kv_bytes(transfer_id, 0, 0, LAYOUT)
        data = Data(transfer_id, 1, sequence, range(1), range(1), "float32", len(payload), checksum(payload))
        return replace(data, **changes), payload  # type: ignore[arg-type]  # fields by name

    return make


BAD_DATA = {
    "gap": (craft(sequence=5), NackReason.GAP),
    "repeated": (craft(sequence=0), NackReason.GAP),
    "checksum": (craft(checksum=7, tokens=range(10, 11)), NackReason.CHECKSUM),
    "dtype": (craft(dtype="bfloat16"), NackReason.LAYOUT),
    "heads": (craft(heads=(0, 1)), NackReason.LAYOUT),
    "length": (craft(tokens=range(2)), NackReason.LAYOUT),
    "layer": (craft(layers=range(4, 5)), NackReason.RANGE),
    "token": (craft(tokens=range(20, 21)), NackReason.RANGE),
    "attempt": (craft(attempt=2), NackReason.MISMATCH),
    "overlap": (craft(), NackReason.OVERLAP),
}


class TestBadData:
    @pytest.mark.parametrize("name", BAD_DATA)
    def test_a_frame_that_does_not_fit_ends_in_nack(self, name: str) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.mark(transfer_id, range(4), range(10))
        make, reason = BAD_DATA[name]
        message, payload = make(transfer_id, 1)
        before = dict(world.sink.placed[transfer_id])
        world.receiver.message(next(iter(world.alive)), message, memoryview(payload), world.now_s)
        world.settle()
        assert [m.reason for m in world.said("<", Nack) if isinstance(m, Nack)] == [reason]
        assert failure(world, transfer_id) == loss(world, transfer_id) == reason.label
        assert world.received_kinds(transfer_id) == ["Opened", "ReceiveFailed", "ReceiveClosed"]
        assert world.sink.placed[transfer_id] == before
        world.assert_nothing_left()

    def test_data_and_commit_before_the_grant(self) -> None:
        world = World().meet()
        for message in (craft()(TransferId(bytes(16)), 0)[0], Commit(TransferId(bytes(16)), 1, 0, FIRST)):
            transfer_id = world.open(grant=False)
            payload = kv_bytes(transfer_id, 0, 0, LAYOUT)
            early = replace(message, transfer_id=transfer_id)
            world.receiver.message(next(iter(world.alive)), early, memoryview(payload), world.now_s)
            world.settle()
            assert loss(world, transfer_id) == "kv_nack_order"
            assert transfer_id not in world.sink.placed

    @pytest.mark.parametrize("tokens", [range(19), range(1, 20)])
    def test_a_commit_that_leaves_something_out(self, tokens: range) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.mark(transfer_id, range(3), range(20))
        world.mark(transfer_id, range(3, 4), tokens)
        world.commit(transfer_id)
        assert failure(world, transfer_id) == loss(world, transfer_id) == "kv_nack_incomplete"

    def test_the_right_count_of_the_wrong_ranges_is_not_enough(self) -> None:
        """Coverage is ranges, not a number of bytes or frames."""
        world = World().meet()
        transfer_id = world.open()
        world.mark(transfer_id, range(4), range(10))
        world.mark(transfer_id, range(4), range(10))
        world.commit(transfer_id)
        assert loss(world, transfer_id) == "kv_nack_overlap"

    def test_a_commit_that_counts_other_frames(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.mark(transfer_id, range(4), range(20))
        world.receiver.message(next(iter(world.alive)), Commit(transfer_id, 1, 2, FIRST), memoryview(b""), world.now_s)
        world.settle()
        assert loss(world, transfer_id) == "kv_nack_gap"

    def test_frames_of_ids_that_are_unknown_or_over(self) -> None:
        world = World().meet()
        message, payload = craft()(TransferId(bytes(16)), 0)
        world.receiver.message(next(iter(world.alive)), message, memoryview(payload), world.now_s)
        world.settle()
        assert world.said("<", Gone) == [Gone(TransferId(bytes(16)), GoneKind.UNKNOWN)]
        over = world.open()
        world.receiver.cancel(over, "gone", world.now_s)
        late = replace(message, transfer_id=over)
        world.receiver.message(next(iter(world.alive)), late, memoryview(payload), world.now_s)
        world.settle()
        assert world.sink.placed == {}
        assert world.receiver.gauges()["kv_late_total"] == 2

    def test_a_damaged_frame_ends_the_connection_and_service_goes_on(self) -> None:
        world = World().meet()
        first, second = world.open(), world.open()
        world.receiver.bad_frame(next(iter(world.alive)), "seal", world.now_s)
        world.settle()
        for transfer_id in (first, second):
            assert loss(world, transfer_id) == failure(world, transfer_id) == "kv_nack_frame"
        world.advance(1.0)
        transfer_id = world.open()
        world.send_all(transfer_id)
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]


class TestMarksThatAreWrong:
    @pytest.mark.parametrize(
        ("layers", "tokens"), [(range(3, 5), range(5)), (range(1), range(15, 21)), (range(1), range(0))]
    )
    def test_a_range_that_does_not_exist_fails_by_name(self, layers: range, tokens: range) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.mark(transfer_id, layers, tokens)
        assert failure(world, transfer_id) == "bad_range"
        assert loss(world, transfer_id) == "peer_aborted"
        world.assert_nothing_left()


STAGES = ["waiting", "opening", "granted", "streaming", "committed"]


def at_stage(world: World, stage: str) -> TransferId:
    """Bring a transfer to a stage of the sender."""
    if stage == "committed":
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Commit) else [frames]
    if stage != "waiting":
        world.meet()
    transfer_id = world.open(grant=stage not in ("waiting", "opening"))
    if stage in ("streaming", "committed"):
        world.mark(transfer_id, range(4), range(10))
    if stage == "committed":
        world.mark(transfer_id, range(4), range(10, 20))
        world.commit(transfer_id)
    world.fault = lambda *args: [args[3]]
    return transfer_id


class TestEnds:
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("finished", [False, True])
    def test_the_sender_aborts(self, stage: str, finished: bool) -> None:
        world = World()
        transfer_id = at_stage(world, stage)
        world.sender.abort(transfer_id, "cancelled", finished, world.now_s)
        world.settle()
        assert "SendFailed" not in world.sent_kinds(transfer_id)
        assert world.sent_kinds(transfer_id)[-1] == "SendClosed"
        if stage == "waiting":
            world.advance(world.theirs.open_wait_s + 1, step_s=50)
        elif finished:
            assert world.received_kinds(transfer_id) == ["Opened", "FinishedEarly", "ReceiveClosed"]
        else:
            assert loss(world, transfer_id) == "peer_aborted"
        assert world.received_kinds(transfer_id)[-1] == "ReceiveClosed"
        world.assert_nothing_left()

    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("how", ["cancel", "refuse"])
    def test_the_receiver_ends_it(self, stage: str, how: str) -> None:
        world = World()
        transfer_id = at_stage(world, stage)
        end = world.receiver.cancel if how == "cancel" else world.receiver.refuse
        end(transfer_id, "BUSY", world.now_s)
        world.settle()
        assert "ReceiveFailed" not in world.received_kinds(transfer_id)
        assert world.received_kinds(transfer_id)[-1] == "ReceiveClosed"
        if stage == "waiting":
            world.meet()
        assert failure(world, transfer_id) == ("peer_aborted" if how == "cancel" else "kv_nack_busy")
        assert world.sent_kinds(transfer_id)[-1] == "SendClosed"
        world.assert_nothing_left()

    @pytest.mark.parametrize("stage", STAGES[1:])
    def test_the_connection_breaks(self, stage: str) -> None:
        world = World()
        transfer_id = at_stage(world, stage)
        world.cut()
        assert failure(world, transfer_id) == loss(world, transfer_id) == "peer_lost"
        world.assert_nothing_left()

    @pytest.mark.parametrize("stage", STAGES)
    def test_each_side_stops(self, stage: str) -> None:
        for side in ("sender", "receiver"):
            world = World()
            transfer_id = at_stage(world, stage)
            (world.sender if side == "sender" else world.receiver).close(world.now_s)
            world.settle()
            kinds = world.sent_kinds(transfer_id) if side == "sender" else world.received_kinds(transfer_id)
            assert kinds[-2:] in (["SendFailed", "SendClosed"], ["ReceiveFailed", "ReceiveClosed"])

    @pytest.mark.parametrize("stage", STAGES)
    def test_a_side_that_falls_silent_is_given_up(self, stage: str) -> None:
        """The link lives (beats pass), but one transfer's messages are lost for good."""
        world = World(settings(produce_wait_s=20.0), settings(open_wait_s=20.0))
        transfer_id = at_stage(world, stage)
        about = (Open, Data, Commit, Abort, Grant, Ack, Nack, Gone)
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, about) else [frames]
        world.advance(60.0)
        assert world.sent_kinds(transfer_id)[-2:] == ["SendFailed", "SendClosed"]
        assert world.received_kinds(transfer_id)[-2:] == ["ReceiveFailed", "ReceiveClosed"]
        world.assert_nothing_left()

    def test_a_commit_without_answer_ends_soon(self) -> None:
        world = World()
        transfer_id = at_stage(world, "committed")
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Commit) else [frames]
        world.advance(world.mine.transfer_idle_s + 0.5)
        assert failure(world, transfer_id) == "no_ack"
        assert loss(world, transfer_id) == "peer_aborted"

    def test_no_grant_in_time_is_busy_not_failure(self) -> None:
        world = World().meet()
        transfer_id = world.open(grant=False)
        world.advance(world.theirs.grant_wait_s + 0.5)
        failed = next(event for event in world.sent if isinstance(event, SendFailed))
        assert (failed.reason, failed.busy) == ("kv_nack_busy", True)
        assert loss(world, transfer_id) == "no_grant"

    @pytest.mark.parametrize(("reason", "label"), [("BUSY", "kv_nack_busy"), ("pool_too_small", "kv_nack_refused")])
    def test_a_refusal_says_why(self, reason: str, label: str) -> None:
        world = World().meet()
        transfer_id = world.open(grant=False)
        world.receiver.refuse(transfer_id, reason, world.now_s)
        world.settle()
        failed = next(event for event in world.sent if isinstance(event, SendFailed))
        assert failed.reason == label
        assert failed.busy == (reason == "BUSY")
        assert failed.detail == ("" if reason == "BUSY" else reason)

    def test_a_pool_that_cannot_be_read_or_written_fails_one_transfer(self) -> None:
        for side in ("source", "sink"):
            world = World().meet()
            other, transfer_id = world.open(), world.open()
            broken = world.source if side == "source" else world.sink
            broken.fails = True
            world.mark(transfer_id, range(4), range(20))
            broken.fails = False
            assert failure(world, transfer_id) == ("pack_failed" if side == "source" else "kv_nack_place")
            assert world.received_kinds(transfer_id)[-1] == "ReceiveClosed"
            world.send_all(other)
            assert world.sent_kinds(other) == ["Granted", "Acked", "SendClosed"]
            world.assert_nothing_left()

    def test_a_slow_prefill_is_not_idle(self) -> None:
        """The sender's beats name its transfers, so a long queue on its side is no reason to give up."""
        world = World().meet()
        transfer_id = world.open()
        world.advance(10 * world.theirs.transfer_idle_s)
        world.send_all(transfer_id)
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]

    def test_a_sender_that_forgot_a_transfer_lets_it_expire(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Abort) else [frames]
        world.sender.abort(transfer_id, "cancelled", False, world.now_s)
        world.advance(world.theirs.transfer_idle_s + 1)
        assert loss(world, transfer_id) == "kv_nack_idle"
        world.assert_nothing_left()


class TestWindow:
    def make(self, window_frames: int) -> World:
        """Frames of 256 KiB, and a window of so many of them."""
        theirs = settings(layout=ROW, window_bytes=window_frames << 18)
        return World(settings(layout=ROW), theirs).meet()

    def test_is_never_exceeded_and_beats_open_it(self) -> None:
        world = self.make(4)
        transfer_id = world.open(128 * 8)
        sent = 0
        limits = [world.theirs.window_bytes]

        def watch(to_receiver: bool, k: int, message: Message, frames: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
            nonlocal sent
            if isinstance(message, Data):
                sent += message.num_bytes
                assert sent <= limits[-1]
            elif not to_receiver and hasattr(message, "window_limit"):
                limits.append(message.window_limit)
            return [frames]

        world.fault = watch
        for chunk in range(8):
            for layer in range(4):
                world.mark(transfer_id, range(layer, layer + 1), range(128 * chunk, 128 * chunk + 128))
        world.commit(transfer_id)
        assert sent == ROW.range_bytes(range(4), 1024)
        assert limits[-1] - limits[0] >= sent - world.theirs.window_bytes // 4
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]

    def test_a_closed_window_stalls_and_ends_by_name(self) -> None:
        world = self.make(4)
        transfer_id = world.open(128 * 4)
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Data) else [frames]
        for layer in range(4):
            world.mark(transfer_id, range(layer, layer + 1), range(512))
        assert len(world.said(">", Data)) == 1
        world.advance(world.mine.transfer_idle_s + 1)
        assert failure(world, transfer_id) == "stalled"
        assert loss(world, transfer_id) == "peer_aborted"

    def test_a_sender_that_ignores_it_is_refused(self) -> None:
        world = self.make(4)
        transfer_id = world.open(128 * 8)
        route = next(iter(world.alive))
        payload = bytes(1 << 20)
        for k in range(2):
            data = Data(transfer_id, 1, k, range(k, k + 1), range(512), "float32", len(payload), checksum(payload))
            world.receiver._links[route].window_limit = 1 << 20
            world.receiver.message(route, data, memoryview(payload), world.now_s)
        assert world.receiver._out
        world.settle()
        assert loss(world, transfer_id) == "kv_nack_window"

    def test_at_most_four_frames_are_inside_a_socket(self) -> None:
        world = World(settings(layout=ROW), settings(layout=ROW)).meet()
        world.release_at_once = False
        transfer_id = world.open(128 * 8)
        for layer in range(4):
            world.mark(transfer_id, range(layer, layer + 1), range(1024))
        assert len(world.said(">", Data)) == 4
        world.unreleased.pop()()
        world.settle()
        assert len(world.said(">", Data)) == 5

    def test_nothing_is_packed_without_staging(self) -> None:
        world = World().meet()
        world.staging_has_room = False
        transfer_id = world.open()
        world.mark(transfer_id, range(4), range(20))
        assert world.source.packed == []
        world.staging_has_room = True
        world.commit(transfer_id)
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]


class TestOrder:
    def order(self, world: World) -> list[TransferId]:
        """Transfers in the order in which their frames were packed."""
        return [transfer_id for transfer_id, _, _ in world.source.packed]

    def make(self, num: int) -> tuple[World, list[TransferId]]:
        """Granted transfers that may not send yet."""
        world = World(settings(layout=ROW), settings(layout=ROW)).meet()
        ids = []
        for k in range(num):
            mine, theirs = world.specs(512, arrived_s=float(num - k))
            world.receiver.expect(theirs, world.now_s)
            world.sender.open(mine, world.now_s)
            world.settle()
            world.receiver.grant(mine.transfer_id, 0, world.now_s)
            world.settle()
            ids.append(mine.transfer_id)
        world.sends_data = False
        return world, ids

    def test_those_still_computing_take_turns(self) -> None:
        world, ids = self.make(3)
        for transfer_id in ids:
            for layer in range(2):
                world.mark(transfer_id, range(layer, layer + 1), range(512))
        world.sends_data = True
        world.settle()
        assert self.order(world) == ids * 2

    def test_complete_ones_go_first_and_the_oldest_of_them(self) -> None:
        world, ids = self.make(3)
        for transfer_id in ids:
            for layer in range(4):
                world.mark(transfer_id, range(layer, layer + 1), range(512))
        for transfer_id in ids[1:]:
            world.commit(transfer_id)
        world.sends_data = True
        world.settle()
        assert self.order(world) == [ids[2]] * 4 + [ids[1]] * 4 + [ids[0]] * 4

    def test_control_goes_before_data(self) -> None:
        world, ids = self.make(2)
        for layer in range(4):
            world.mark(ids[0], range(layer, layer + 1), range(512))
        world.sender.abort(ids[1], "cancelled", False, world.now_s)
        world.sends_data = True
        world.settle()
        said = [type(message) for way, message in world.log if way == ">"]
        assert said.index(Abort) < said.index(Data)
