"""The byte window, the bound on frames in a socket and in staging, and whose turn it is."""

from pdserve.core.ids import TransferId, new_incarnation
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import SendFailed
from pdserve.kvtransfer.instructions import Emit
from pdserve.kvtransfer.messages import (
    Abort,
    Beat,
    Data,
    Grant,
    Message,
    Welcome,
)
from pdserve.kvtransfer.sender_table import SenderTable
from pdserve.kvtransfer.staging import StagingPool
from pdserve.kvtransfer.wire import checksum
from tests.kvtransfer.nodes import settings, spec_for
from tests.kvtransfer.world import World, failure, loss

ROW = KvLayout((LayerLayout(4, 64, 64),) * 4, "float32")
"""2 KiB per token and layer: 128 tokens fill a frame."""


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
        assert sent <= limits[-1] <= sent + world.theirs.window_bytes
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

    def test_a_link_that_moves_stalls_nobody(self) -> None:
        """Two prompts drain for longer than `transfer_idle_s` over a slow link; the one whose turn comes last must not fail."""
        world = self.make(64)
        world.release_at_once = False
        older, younger = world.open(1024), world.open(1024)
        for transfer_id in (older, younger):
            for layer in range(4):
                world.mark(transfer_id, range(layer, layer + 1), range(1024))
        world.commit(older)
        num_frames = 2 * 2 * 4
        for _ in range(num_frames):
            world.advance(2.0)
            world.unreleased.pop(0)()
        assert num_frames * 2.0 / 2 > world.mine.transfer_idle_s, (
            "the younger one waits longer than it may without progress"
        )
        world.commit(younger)
        for transfer_id in (older, younger):
            assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
            world.sink.check(transfer_id, 1024)

    def test_progress_of_one_link_is_not_that_of_another(self) -> None:
        mine, first, second = settings(layout=ROW, transfer_idle_s=10.0), new_incarnation(), new_incarnation()
        table, staging = SenderTable(mine), StagingPool(16, 1 << 20)
        table.set_peers({first: "first", second: "second"}, 0.0)
        routes = {first: Route(b"first"), second: Route(b"second")}
        specs = {peer: spec_for(peer, 4096) for peer in routes}
        for peer, route in routes.items():
            table.dialled(peer, route)
            table.connected(route, 0.0)
            table.message(route, Welcome(peer, (), "on_open", 1 << 30), 0.0)
            table.open(specs[peer], 0.0)
            table.message(route, Grant(specs[peer].transfer_id), 0.0)
            table.mark_ready(specs[peer].transfer_id, range(4), range(4096), 0.0)
        while plan := table.next_data(staging, 0.0):
            table.data_sent(plan, 0.0, 0.0)
        for second_s in range(1, 12):
            for peer, route in routes.items():
                table.message(route, Beat(1 << 30), float(second_s))
                if peer == first:
                    table.data_released(table._by_route[route], route)
            while plan := table.next_data(staging, float(second_s)):
                table.data_sent(plan, 0.0, float(second_s))
            table.expire(float(second_s))
        failed = [order.event for order in iter(table.take, None) if isinstance(order, Emit)]
        assert [(e.transfer_id, e.reason) for e in failed if isinstance(e, SendFailed)] == [
            (specs[second].transfer_id, "stalled")
        ]
        table.check_invariants()

    def test_it_starts_anew_with_each_connection(self) -> None:
        world = self.make(4)
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Beat) else [frames]
        transfer_id = world.open(128 * 4)
        world.mark(transfer_id, range(1), range(512))
        assert len(world.said(">", Data)) == 1
        world.cut()
        world.advance(world.mine.retry_max_s)
        assert len(world.said(">", Data)) == 2, "the second connection has a whole window"

    def test_a_sender_that_ignores_it_is_refused(self) -> None:
        world = self.make(4)
        transfer_id = world.open(128 * 8)
        route = next(iter(world.alive))
        payload = bytes(1 << 20)
        for k in range(2):
            data = Data(transfer_id, 1, k, range(k, k + 1), range(512), "float32", len(payload), checksum(payload))
            world.receiver._links[route].window.limit = 1 << 20
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

    def test_frames_inside_a_socket_go_with_their_connection(self) -> None:
        """They were counted until the next handshake, and late releases must not count against the next connection."""
        world = World(settings(layout=ROW), settings(layout=ROW)).meet()
        world.release_at_once = False
        world.mark(world.open(128 * 8), range(4), range(1024))
        assert world.sender.gauges()["kv_frames_in_sockets"] == 4
        world.cut()
        assert world.sender.gauges()["kv_frames_in_sockets"] == 0
        for release in world.unreleased:
            release()
        world.advance(1.0)
        world.sender.check_invariants()
        assert world.sender.gauges()["kv_frames_in_sockets"] == 4, "those of the next connection"

    def test_nothing_is_packed_without_staging(self) -> None:
        world = World().meet()
        slabs = [world.staging.lease(Route(b"another"), world.now_s) for _ in range(16)]
        transfer_id = world.open()
        world.mark(transfer_id, range(4), range(20))
        assert world.source.packed == []
        slabs.pop().release(world.now_s)
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
