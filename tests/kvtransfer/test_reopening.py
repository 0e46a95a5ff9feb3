"""A connection that breaks costs its transfers nothing but time: they are opened again on the next one, and sent anew.

The KV still stands in the prefill node's pool, and the decode node's grant still holds, so nobody computes anything again.
"""

from dataclasses import replace

import pytest

from pdserve.core.ids import TransferId, new_incarnation
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import PeerDown, ReceiveFailed, Reopened, SendClosed, SendFailed
from pdserve.kvtransfer.messages import Ack, Commit, Data, Grant, Message, Open
from pdserve.kvtransfer.settings import MAX_REOPENS
from pdserve.kvtransfer.wire import checksum
from tests.kvtransfer.nodes import settings
from tests.kvtransfer.test_ends import at_stage
from tests.kvtransfer.test_flow import ROW
from tests.kvtransfer.world import Frames, World, failure, loss

BREAKING = ["opening", "granted", "streaming", "committed"]
WHOLE = (["Granted", "Acked", "SendClosed"], ["Opened", "Received", "ReceiveClosed"])


def told(world: World, transfer_id: TransferId) -> tuple[list[str], list[str]]:
    """What both nodes were told, but for what asks nothing of them."""
    kinds = world.sent_kinds(transfer_id), world.received_kinds(transfer_id)
    assert kinds[0].count("Reopened") == kinds[1].count("Reopened")
    return [k for k in kinds[0] if k != "Reopened"], [k for k in kinds[1] if k != "Reopened"]


def finish(world: World, transfer_id: TransferId, stage: str) -> None:
    """Do what is left from a stage on, with a link that comes back, and look at the bytes."""
    world.advance(1.0)
    if stage == "opening":
        world.receiver.grant(transfer_id, 0, world.now_s)
        world.settle()
    if stage != "committed":
        left = range(10, 20) if stage == "streaming" else range(20)
        world.mark(transfer_id, range(4), left)
        world.commit(transfer_id)
    assert told(world, transfer_id) == WHOLE
    world.sink.check(transfer_id, 20)
    world.assert_nothing_left()


class TestABreak:
    @pytest.mark.parametrize("stage", BREAKING)
    @pytest.mark.parametrize("who", ["both", "sender", "receiver"])
    def test_is_survived_whoever_learns_of_it(self, stage: str, who: str) -> None:
        """The other side learns by the next HELLO, or by a REFUSE to its next message."""
        world = World()
        transfer_id = at_stage(world, stage)
        world.cut(tell_sender=who != "receiver", tell_receiver=who != "sender")
        if who == "receiver":
            world.advance(world.mine.lease_s)
        finish(world, transfer_id, stage)
        assert len([event for event in world.sent if isinstance(event, PeerDown)]) == 1
        for events in (world.sent, world.received):
            assert [event.transfer_id for event in events if isinstance(event, Reopened)] == [transfer_id]

    def test_says_why_it_was(self) -> None:
        world = World()
        at_stage(world, "streaming")
        world.cut()
        world.advance(1.0)
        reopened = [event for event in (*world.sent, *world.received) if isinstance(event, Reopened)]
        assert [event.because for event in reopened] == ["disconnected", "disconnected"]

    def test_is_survived_a_few_times(self) -> None:
        """A link that breaks again and again carries nothing, and the prompt is better computed elsewhere."""
        world = World()
        transfer_id = at_stage(world, "streaming")
        for _ in range(MAX_REOPENS):
            world.cut()
            world.advance(1.0)
        assert told(world, transfer_id) == (["Granted"], ["Opened"])
        world.cut()
        assert failure(world, transfer_id) == loss(world, transfer_id) == "peer_lost"
        world.assert_nothing_left()

    def test_is_counted_in_what_was_sent(self) -> None:
        """Ten tokens before the break, and all twenty after it."""
        world = World()
        transfer_id = at_stage(world, "streaming")
        world.cut()
        finish(world, transfer_id, "streaming")
        closed = next(event for event in world.sent if isinstance(event, SendClosed))
        layout = world.mine.layout
        assert closed.stats.kv_bytes == layout.range_bytes(range(4), 10) + layout.range_bytes(range(4), 20)
        assert closed.stats.num_frames == len(world.said(">", Data)) == 3

    def test_leaves_the_window_and_the_socket_of_the_next_connection_whole(self) -> None:
        world = World(settings(layout=ROW), settings(layout=ROW, window_bytes=8 << 20)).meet()
        world.release_at_once = False
        transfer_id = world.open(128 * 8)
        world.mark(transfer_id, range(4), range(1024))
        assert world.sender.gauges()["kv_frames_in_sockets"] == 4
        world.cut()
        world.advance(1.0)
        for release in world.unreleased[:4]:
            release()
        world.sender.check_invariants()
        (link,) = world.sender._links.values()
        assert (link.sent_bytes, link.num_in_socket) == (4 << 20, 4), (
            "four frames of the new connection, none of the old"
        )
        while world.unreleased:
            world.unreleased.pop()()
            world.settle()
        world.commit(transfer_id)
        assert told(world, transfer_id) == WHOLE

    def test_takes_along_no_frame_of_the_old_connection(self) -> None:
        """One that was in the network when the next connection greeted."""
        world = World()
        late: list[tuple[Data, bytes]] = []

        def hold(to_receiver: bool, k: int, message: Message, frames: Frames) -> list[Frames]:
            if isinstance(message, Data):
                late.append((message, frames[1]))
                return []
            return [frames]

        world.meet()
        transfer_id = world.open()
        world.fault = hold
        world.mark(transfer_id, range(4), range(10))
        (old,) = world.alive
        world.cut(tell_receiver=False)
        world.fault = lambda *args: [args[3]]
        world.sends_data = False
        world.advance(1.0)
        ((data, payload),) = late
        world.receiver.message(old, data, memoryview(payload), world.now_s)
        assert transfer_id not in world.sink.placed
        assert world.receiver.num_strange == 1
        world.sends_data = True
        finish(world, transfer_id, "streaming")


class TestTheGrant:
    def test_holds_and_is_told_again(self) -> None:
        """The node is asked once, also about the same skipped tokens."""
        world = World().meet()
        transfer_id = world.open(skip_tokens=16)
        world.mark(transfer_id, range(4), range(20))
        world.cut()
        world.advance(1.0)
        world.commit(transfer_id)
        assert [message.skip_tokens for message in world.said("<", Grant) if isinstance(message, Grant)] == [16, 16]
        assert {message.tokens for message in world.said(">", Data) if isinstance(message, Data)} == {range(16, 20)}
        assert told(world, transfer_id) == WHOLE

    def test_may_be_given_while_there_is_no_connection(self) -> None:
        world = World()
        transfer_id = at_stage(world, "opening")
        world.cut()
        world.receiver.grant(transfer_id, 0, world.now_s)
        world.settle()
        assert world.said("<", Grant) == []
        finish(world, transfer_id, "granted")

    def test_does_not_change(self) -> None:
        world = World()
        transfer_id = at_stage(world, "streaming")
        world.cut()
        world.receiver._transfers[transfer_id]._skip_tokens = 4
        world.advance(1.0)
        assert failure(world, transfer_id) == "bad_grant"
        assert loss(world, transfer_id) == "peer_aborted"

    def test_that_never_comes_is_busy_as_before(self) -> None:
        world = World()
        transfer_id = at_stage(world, "opening")
        world.cut()
        world.advance(world.theirs.grant_wait_s + 2.0)
        assert loss(world, transfer_id) == "no_grant"
        assert failure(world, transfer_id) == "kv_nack_busy"


class TestTheAnswer:
    def committed(self) -> tuple[World, TransferId]:
        """COMMIT was adopted, and ACK is lost with the connection."""
        world = World().meet()
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Ack) else [frames]
        transfer_id = world.open()
        world.send_all(transfer_id)
        assert world.received_kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]
        world.fault = lambda *args: [args[3]]
        world.cut()
        return world, transfer_id

    def test_to_a_commit_is_given_again_on_the_next_connection(self) -> None:
        world, transfer_id = self.committed()
        num_frames = len(world.said(">", Data))
        world.advance(1.0)
        assert [kind for kind in world.sent_kinds(transfer_id) if kind != "Reopened"] == WHOLE[0]
        assert len(world.said(">", Data)) == num_frames, "nothing is sent again"
        world.assert_nothing_left()

    def test_to_what_was_never_said_is_a_fault(self) -> None:
        for stage in ("opening", "streaming"):
            world = World()
            transfer_id = at_stage(world, stage)
            (route,) = world.alive
            world.sender.message(route, Ack(transfer_id), world.now_s)
            world.settle()
            assert failure(world, transfer_id) == "stale_answer"
            assert loss(world, transfer_id) == "peer_aborted"


class TestNoNextConnection:
    @pytest.mark.parametrize("stage", BREAKING)
    def test_ends_both_by_name_each_in_its_time(self, stage: str) -> None:
        """The sender owns the wait; the receiver's own is two leases longer."""
        world = World()
        transfer_id = at_stage(world, stage)
        world.answers = False
        world.cut()
        world.advance(world.mine.connect_wait_s - 0.5)
        assert "SendFailed" not in world.sent_kinds(transfer_id)
        world.advance(1.0)
        assert failure(world, transfer_id) == "peer_lost"
        failed = next(event for event in world.sent if isinstance(event, SendFailed))
        assert "lost: disconnected" in failed.detail
        assert "nobody listens" in failed.detail
        assert "ReceiveFailed" not in world.received_kinds(transfer_id)
        world.advance(2 * world.theirs.lease_s)
        assert loss(world, transfer_id) == "peer_lost"
        world.assert_nothing_left()

    @pytest.mark.parametrize("stage", BREAKING)
    @pytest.mark.parametrize("end", ["abort", "finished", "cancel"])
    def test_an_end_by_a_node_meanwhile(self, stage: str, end: str) -> None:
        """A router that cancels tells both nodes. Told one only, the other learns of it by the next connection, or in time."""
        world = World()
        transfer_id = at_stage(world, stage)
        world.cut()
        if end == "cancel":
            world.receiver.cancel(transfer_id, "cancelled", world.now_s)
        else:
            world.sender.abort(transfer_id, "stop", end == "finished", world.now_s)
        world.settle()
        kinds = world.received_kinds(transfer_id) if end == "cancel" else world.sent_kinds(transfer_id)
        assert kinds[-1] in ("ReceiveClosed", "SendClosed"), "at once"
        world.advance(world.theirs.connect_wait_s + 2 * world.theirs.lease_s + 1.0)
        if end == "cancel":
            assert failure(world, transfer_id) == "peer_aborted"
        else:
            assert loss(world, transfer_id) == "peer_lost"
        world.assert_nothing_left()

    def test_another_process_at_the_address_ends_it_at_once(self) -> None:
        world = World()
        transfer_id = at_stage(world, "streaming")
        world.receiver = type(world.receiver)(replace(world.theirs, incarnation=new_incarnation()))
        world.receiver.set_peers(frozenset({world.mine.incarnation}), world.now_s)
        world.cut(tell_receiver=False)
        world.advance(1.0)
        assert failure(world, transfer_id) == "peer_refused"

    def test_a_node_that_stops_says_so(self) -> None:
        for side in ("sender", "receiver"):
            world = World()
            transfer_id = at_stage(world, "streaming")
            world.cut()
            (world.sender if side == "sender" else world.receiver).close(world.now_s)
            world.settle()
            assert (failure if side == "sender" else loss)(world, transfer_id) == "shutdown"


class TestPeers:
    @pytest.mark.parametrize("is_told", [True, False])
    def test_one_that_is_named_no_more_may_finish_what_it_began(self, is_told: bool) -> None:
        """A prefill node that drains is not listed any more, and its connection breaks, whether or not this side learns of it."""
        world = World()
        transfer_id = at_stage(world, "streaming")
        world.receiver.set_peers(frozenset(), world.now_s)
        world.sender.set_peers({}, world.now_s)
        world.cut(tell_receiver=is_told)
        finish(world, transfer_id, "streaming")
        world.advance(1.0)
        assert world.receiver.gauges()["kv_links"] == world.sender.gauges()["kv_links"] == 0

    def test_one_with_nothing_left_to_finish_is_let_go(self) -> None:
        world = World()
        transfer_id = at_stage(world, "streaming")
        other = world.open()
        world.receiver.set_peers(frozenset(), world.now_s)
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Open) else [frames]
        world.cut()
        world.advance(1.0)
        for each in (transfer_id, other):
            assert world.receiver.gauges()["kv_links_up"] == 1
            world.receiver.cancel(each, "cancelled", world.now_s)
            world.settle()
        assert world.receiver.gauges()["kv_links"] == 0

    def test_a_new_address_of_the_same_process_is_another_connection(self) -> None:
        world = World()
        transfer_id = at_stage(world, "streaming")
        world.sender.set_peers({world.theirs.incarnation: "elsewhere"}, world.now_s)
        finish(world, transfer_id, "streaming")


def test_a_frame_that_comes_before_its_open_is_out_of_order() -> None:
    """On the new connection nothing counts before OPEN, though the grant holds."""
    for stage, message in (("streaming", Data), ("committed", Commit)):
        world = World()
        transfer_id = at_stage(world, stage)
        first: list[Message] = [said for said in world.said(">", message) if isinstance(said, message)]
        world.fault = lambda to_receiver, k, said, frames: [] if isinstance(said, Open) else [frames]
        world.cut()
        world.advance(1.0)
        route: Route = next(iter(world.alive))
        payload = world_payload(world, transfer_id) if message is Data else b""
        world.receiver.message(route, first[0], memoryview(payload), world.now_s)
        world.settle()
        assert loss(world, transfer_id) == "kv_nack_order"
        assert any(isinstance(event, ReceiveFailed) for event in world.received)


def world_payload(world: World, transfer_id: TransferId) -> bytes:
    """The bytes of the first frame of a transfer."""
    into = bytearray(world.mine.layout.range_bytes(range(4), 10))
    world.source.pack(transfer_id, range(4), range(10), memoryview(into))
    data = next(message for message in world.said(">", Data) if isinstance(message, Data))
    assert data.checksum == checksum(into)
    return bytes(into)
