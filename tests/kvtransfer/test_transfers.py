"""Transfers through both machines: the tables, the good way, repeated messages, and what a submit decides."""

from dataclasses import replace
from enum import Enum

import pytest

from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.lifecycle import TransitionTable
from pdserve.kvtransfer.events import Acked, Received
from pdserve.kvtransfer.messages import (
    Ack,
    Commit,
    Data,
    Gone,
    GoneKind,
    Grant,
    Message,
    Open,
)
from pdserve.kvtransfer.receiver import RECEIVE_TABLE
from pdserve.kvtransfer.receiver_link import RECEIVER_LINK_TABLE
from pdserve.kvtransfer.sender import SEND_TABLE
from pdserve.kvtransfer.sender_link import SENDER_LINK_TABLE
from tests.kvtransfer.nodes import FIRST, LAYOUT, settings
from tests.kvtransfer.world import World, failure, loss

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
        assert world.receiver.gauges()["kv_parked_opens"] == 0
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
