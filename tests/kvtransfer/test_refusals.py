"""Frames that do not belong: of a wrong peer, of an id that is over, or with content that does not fit."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.core.ids import TransferId, new_incarnation, new_transfer_id
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import Granted, TransferSpec
from pdserve.kvtransfer.instructions import Dial, Emit
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
    Welcome,
)
from pdserve.kvtransfer.sender_table import SenderTable
from pdserve.kvtransfer.wire import checksum
from tests.kvtransfer.nodes import FIRST, LAYOUT, kv_bytes, settings
from tests.kvtransfer.world import World, failure, loss, peers_up


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
        assert len(peers_up(world.received)) == 2
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


def test_answers_of_another_decode_node_are_not_taken() -> None:
    mine, first, second = settings(), new_incarnation(), new_incarnation()
    table, routes = SenderTable(mine), dict[bytes, Route]()
    table.set_peers({first: "first", second: "second"}, 0.0)

    def carry_out() -> list[object]:
        done: list[object] = []
        while (order := table.take()) is not None:
            done.append(order)
            if isinstance(order, Dial):
                routes[order.peer] = Route(order.address.encode())
                table.dialled(order.peer, routes[order.peer])
                table.connected(routes[order.peer], 0.0)
        return done

    carry_out()
    for peer in (first, second):
        table.message(routes[peer], Welcome(peer, (), "on_open", 1 << 20), 0.0)
    spec = TransferSpec(new_transfer_id(), 1, first, bytes(32), 20, 0.0)
    table.open(spec, 0.0)
    carry_out()
    stray: list[Message] = [
        Grant(spec.transfer_id),
        Nack(spec.transfer_id, NackReason.BUSY),
        Abort(spec.transfer_id),
        Gone(spec.transfer_id, GoneKind.OVER),
    ]
    for message in stray:
        table.message(routes[second], message, 0.0)
    assert carry_out() == []
    table.message(routes[first], Grant(spec.transfer_id), 0.0)
    assert carry_out() == [Emit(Granted(spec.transfer_id, 0))]
    table.check_invariants()


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
