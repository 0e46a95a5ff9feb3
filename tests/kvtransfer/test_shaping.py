"""A shaped link is exact in its own clock, keeps order, gives buffers back when their last bit left, and never polls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.clock import ManualClock
from pdserve.core.link_shape import LinkShape
from pdserve.kvtransfer.channel import Arrived, ChannelEvent, Connected, Lost, Route
from pdserve.kvtransfer.holding import MAX_HELD
from pdserve.kvtransfer.inprocess import InProcessChannel, InProcessNetwork
from pdserve.kvtransfer.shaping import Passage, ShapedChannel, ShapedLine

GIGABIT = LinkShape(1e9, 0.002)


class WatchedChannel(InProcessChannel):
    """Notes how long each poll was meant to wait, and does not wait."""

    def __init__(self, network: InProcessNetwork) -> None:
        super().__init__(network)
        self.timeouts: list[float | None] = []

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        self.timeouts.append(timeout_s)
        return super().poll(0.0)


class Link:
    """A shaped end that dials a plain one, and a clock that stands still."""

    def __init__(self, shape: LinkShape) -> None:
        network, self.clock = InProcessNetwork(), ManualClock()
        self.far, self.transport = network.channel(), WatchedChannel(network)
        self.near = ShapedChannel(self.transport, shape, self.clock)
        self.route = self.near.connect(self.far.listen("there", 0))
        assert self.near.poll(0.0) == [Connected(self.route)]
        self.released: list[int] = []

    def arrived(self) -> list[bytes]:
        """Let the shaped end do what is due, and return the headers that came."""
        self.near.poll(0.0)
        return [bytes(event.frames[0]) for event in self.far.poll(0.0) if isinstance(event, Arrived)]

    def send_data(self, number: int, num_bytes: int) -> bool:
        payload = memoryview(bytearray(num_bytes))
        return self.near.send_data(self.route, b"%d" % number, payload, lambda: self.released.append(number))


class TestTheLine:
    def test_a_frame_takes_its_bits_and_the_latency(self) -> None:
        assert ShapedLine(GIGABIT).admit(125_000, 5.0) == Passage(5.001, 5.003)

    def test_frames_queue_behind_each_other(self) -> None:
        line = ShapedLine(GIGABIT)
        passages = [line.admit(125_000, 0.0) for _ in range(3)]
        assert [p.leaves_s for p in passages] == pytest.approx([0.001, 0.002, 0.003])
        assert [p.arrives_s for p in passages] == pytest.approx([0.003, 0.004, 0.005])
        assert line.admit(125_000, 1.0) == Passage(1.001, 1.003), "an idle line saves nothing up"

    def test_unlimited_has_latency_only(self) -> None:
        assert ShapedLine(LinkShape(float("inf"), 0.25)).admit(1 << 30, 1.0) == Passage(1.0, 1.25)

    @given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 0.1)), min_size=1, max_size=50), st.integers(0, 99))
    def test_order_and_bandwidth_hold_for_any_traffic(self, frames: list[tuple[int, float]], seed: int) -> None:
        shape, now_s = LinkShape(1e8, 0.01, 0.05), 0.0
        line, before = ShapedLine(shape, seed), Passage(0.0, 0.0)
        for num_bytes, pause_s in frames:
            now_s += pause_s
            passage = line.admit(num_bytes, now_s)
            assert passage.leaves_s == pytest.approx(max(before.leaves_s, now_s) + 8 * num_bytes / 1e8)
            assert passage.arrives_s >= before.arrives_s, "overtaken"
            late_s = passage.arrives_s - max(passage.leaves_s + shape.latency_s, before.arrives_s)
            assert -1e-9 <= late_s <= shape.jitter_s + 1e-9
            before = passage


class TestTheChannel:
    def test_nothing_arrives_early_or_late(self) -> None:
        link = Link(GIGABIT)
        assert link.send_data(0, 124_999)
        assert link.near.next_due_s() == pytest.approx(0.001), "the buffer is free when its last bit left"
        link.clock.advance(0.0009)
        assert (link.arrived(), link.released) == ([], [])
        link.clock.advance(0.0002)
        assert (link.arrived(), link.released) == ([], [0])
        link.clock.advance(0.0018)
        assert link.arrived() == [], "0.0029 s"
        link.clock.advance(0.0002)
        assert link.arrived() == [b"0"]

    def test_control_waits_behind_data(self) -> None:
        link = Link(GIGABIT)
        link.send_data(0, 125_000)
        link.near.send(link.route, b"commit")
        link.clock.advance(1.0)
        assert link.arrived() == [b"0", b"commit"]

    def test_an_idle_link_waits_as_its_transport_does(self) -> None:
        link = Link(GIGABIT)
        link.transport.timeouts.clear()
        link.near.poll(None)
        link.near.poll(7.0)
        assert link.transport.timeouts == [None, 7.0], "no wake-ups of its own"

    def test_a_busy_link_waits_for_exactly_what_is_due(self) -> None:
        link = Link(LinkShape(float("inf"), 0.25))
        link.near.send(link.route, b"x")
        link.transport.timeouts.clear()
        link.near.poll(None)
        assert link.transport.timeouts == [0.25]

    def test_a_changed_buffer_does_not_change_what_was_sent(self) -> None:
        link = Link(GIGABIT)
        payload = bytearray(b"before")
        link.near.send_data(link.route, b"h", memoryview(payload), lambda: None)
        payload[:] = b"after!"
        link.clock.advance(1.0)
        link.near.poll(0.0)
        (event,) = [event for event in link.far.poll(0.0) if isinstance(event, Arrived)]
        assert bytes(event.frames[1]) == b"before"

    def test_a_lost_route_takes_along_what_is_held_and_frees_its_buffers(self) -> None:
        link = Link(GIGABIT)
        link.send_data(0, 1000)
        link.far.close()
        assert isinstance(link.near.poll(0.0)[0], Lost)
        assert not link.near.send(link.route, b"too late")
        assert link.near.gauges()["kv_held_frames"] == 0
        link.clock.advance(1.0)
        link.near.poll(0.0)
        assert link.released == [0]

    def test_what_is_held_has_a_bound(self) -> None:
        link = Link(LinkShape(1.0))
        assert all(link.near.send(link.route, b"x") for _ in range(MAX_HELD))
        assert not link.near.send(link.route, b"x")
        link.near.close()
        assert link.near.gauges()["kv_held_frames"] == 0

    def test_close_gives_every_buffer_back_once(self) -> None:
        link = Link(GIGABIT)
        for number in range(3):
            link.send_data(number, 1000)
        link.near.close()
        link.near.close()
        assert sorted(link.released) == [0, 1, 2]

    def test_two_routes_do_not_share_a_line(self) -> None:
        link = Link(LinkShape(8.0))
        other = link.near.connect("inprocess://there:1")
        assert link.near.poll(0.0) == [Connected(other)]
        link.near.send(link.route, b"12345678")
        link.near.send(Route(other), b"x")
        link.clock.advance(1.0)
        assert link.arrived() == [b"x"]
