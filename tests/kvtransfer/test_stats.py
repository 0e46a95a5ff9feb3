"""What a transfer took: the waits that a request's timeline is made of are counted on both sides, also when they end badly."""

import pytest

from pdserve.core.ids import TransferId
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import Acked, Received, SendClosed, TransferStats
from pdserve.kvtransfer.messages import Data, Grant, Message, Nack
from tests.kvtransfer.nodes import settings
from tests.kvtransfer.world import Frames, World, failure

ROW = KvLayout((LayerLayout(4, 64, 64),) * 4, "float32")
"""2 KiB per token and layer: 512 tokens of one layer fill a frame of 1 MiB."""


def closed(world: World, transfer_id: TransferId) -> TransferStats:
    return next(e.stats for e in world.sent if isinstance(e, SendClosed) and e.transfer_id == transfer_id)


def both(world: World) -> tuple[TransferStats, TransferStats]:
    """Stats of the one transfer that was adopted: of its sender, of its receiver."""
    (acked,) = [event.stats for event in world.sent if isinstance(event, Acked)]
    (received,) = [event.stats for event in world.received if isinstance(event, Received)]
    return acked, received


class TestGrantWait:
    def test_runs_from_open_to_grant_on_both_sides(self) -> None:
        world = World().meet()
        world.advance(1.0)
        transfer_id = world.open(grant=False)
        world.advance(4.0)
        world.receiver.grant(transfer_id, 0, world.now_s)
        world.settle()
        world.advance(2.0)
        world.send_all(transfer_id)
        assert [stats.grant_wait_s for stats in both(world)] == pytest.approx([4.0, 4.0])
        assert closed(world, transfer_id).grant_wait_s == pytest.approx(4.0)

    def test_does_not_begin_before_there_is_a_link(self) -> None:
        world = World()
        transfer_id = world.open(grant=False)
        world.advance(2.0)
        world.meet()
        world.advance(1.0)
        world.receiver.grant(transfer_id, 0, world.now_s)
        world.send_all(transfer_id)
        assert [stats.grant_wait_s for stats in both(world)] == pytest.approx([1.0, 1.0])

    def test_counts_the_time_in_which_the_open_was_parked(self) -> None:
        world = World().meet()
        mine, theirs = world.specs()
        world.sender.open(mine, world.now_s)
        world.settle()
        world.advance(1.5)
        world.receiver.expect(theirs, world.now_s)
        world.settle()
        world.advance(1.0)
        world.receiver.grant(mine.transfer_id, 0, world.now_s)
        world.send_all(mine.transfer_id)
        assert [stats.grant_wait_s for stats in both(world)] == pytest.approx([2.5, 2.5])

    def test_a_repeated_open_does_not_begin_it_anew(self) -> None:
        world = World().meet()
        transfer_id = world.open(grant=False)
        world.fault = lambda to_receiver, k, message, frames: [] if isinstance(message, Grant) else [frames]
        world.receiver.grant(transfer_id, 0, world.now_s)
        world.settle()
        world.fault = lambda *args: [args[3]]
        world.advance(world.mine.lease_s)
        world.send_all(transfer_id)
        mine, theirs = both(world)
        assert (mine.grant_wait_s, theirs.grant_wait_s) == pytest.approx((world.mine.lease_s, 0.0))

    def test_that_no_grant_ends_is_counted_too(self) -> None:
        world = World().meet()
        transfer_id = world.open(grant=False)
        world.advance(3.0)
        world.sender.abort(transfer_id, "cancelled", False, world.now_s)
        world.settle()
        assert closed(world, transfer_id).grant_wait_s == pytest.approx(3.0)


class TestStalled:
    def stall(self) -> tuple[World, TransferId]:
        """A transfer that has more ready than the window holds, and a receiver whose window does not move."""
        world = World(settings(layout=ROW), settings(layout=ROW, window_bytes=2 << 20)).meet()
        transfer_id = world.open(512)

        def shut(to_receiver: bool, k: int, message: Message, frames: Frames) -> list[Frames]:
            return [] if not to_receiver and not isinstance(message, Nack) else [frames]

        world.fault = shut
        for layer in range(4):
            world.mark(transfer_id, range(layer, layer + 1), range(512))
        assert len(world.said(">", Data)) == 2
        return world, transfer_id

    def test_runs_until_the_next_frame_goes(self) -> None:
        world, transfer_id = self.stall()
        world.advance(1.5)
        world.fault = lambda *args: [args[3]]
        world.advance(0.5)
        world.commit(transfer_id)
        mine, theirs = both(world)
        assert (mine.stalled_s, theirs.stalled_s) == pytest.approx((2.0, 0.0))

    def test_that_ends_with_the_transfer_is_counted_too(self) -> None:
        world, transfer_id = self.stall()
        world.advance(2.0)
        world.sender.abort(transfer_id, "cancelled", False, world.now_s)
        world.settle()
        assert closed(world, transfer_id).stalled_s == pytest.approx(2.0)

    def test_everyone_on_the_link_with_data_ready_is_stalled(self) -> None:
        world, first = self.stall()
        world.fault = lambda *args: [args[3]]
        second, third = world.open(512), world.open(512)
        world.sends_data = False
        world.mark(second, range(1), range(512))
        for _ in range(16):
            world.staging.lease(Route(b"another"), world.now_s)
        world.sends_data = True
        world.settle()
        world.advance(1.0)
        for transfer_id in (first, second, third):
            world.sender.abort(transfer_id, "cancelled", False, world.now_s)
        world.settle()
        assert closed(world, second).stalled_s == pytest.approx(1.0), "it was not even its turn"
        assert closed(world, third).stalled_s == 0.0, "nothing of it was ready"

    def test_time_without_data_is_not_stalled(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.advance(5.0)
        world.send_all(transfer_id)
        assert both(world)[0].stalled_s == 0.0

    def test_no_progress_at_all_ends_by_name(self) -> None:
        world, transfer_id = self.stall()
        world.fault = lambda to_receiver, k, message, frames: [] if hasattr(message, "window_limit") else [frames]
        for _ in range(50):  # both links live, the window does not
            world.advance(0.25)
            for link in world.sender._links.values():
                link.heard(world.now_s)
            for other in world.receiver._links.values():
                other.heard(world.now_s)
        assert failure(world, transfer_id) == "stalled"
        assert closed(world, transfer_id).stalled_s == pytest.approx(world.mine.transfer_idle_s, abs=0.3)
