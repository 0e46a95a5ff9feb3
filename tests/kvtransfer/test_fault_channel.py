"""Each injected fault does what its name says, to the frame that was meant, and the same seed does it again."""

from functools import partial

import pytest

from pdserve.core.clock import ManualClock
from pdserve.core.link_faults import FaultKind, LinkFaults
from pdserve.kvtransfer.channel import Arrived, Connected, Lost
from pdserve.kvtransfer.faults import FaultPlan, FaultyChannel
from pdserve.kvtransfer.inprocess import InProcessNetwork

PAYLOAD = bytes(range(64))


class Link:
    """A faulty end that dials a plain one."""

    def __init__(self, faults: LinkFaults) -> None:
        network, self.clock = InProcessNetwork(), ManualClock()
        self.far = network.channel()
        self.near = FaultyChannel(network.channel(), faults, self.clock)
        self.route = self.near.connect(self.far.listen("there", 0))
        assert self.near.poll(0.0) == [Connected(self.route)]
        self.released: list[int] = []
        self.lost: list[Lost] = []

    def send(self, *numbers: int) -> None:
        """Send DATA frames with these headers."""
        for number in numbers:
            buffer = memoryview(bytearray(PAYLOAD))
            self.near.send_data(self.route, b"%d" % number, buffer, partial(self.released.append, number))

    def arrived(self) -> list[tuple[bytes, bytes]]:
        self.lost += [event for event in self.near.poll(0.0) if isinstance(event, Lost)]
        events = [event for event in self.far.poll(0.0) if isinstance(event, Arrived)]
        return [(bytes(event.frames[0]), bytes(event.frames[1])) for event in events]

    def headers(self) -> list[int]:
        return [int(header) for header, _ in self.arrived()]


def second(kind: FaultKind) -> Link:
    """A link on which the second frame of three meets a fault."""
    link = Link(LinkFaults(at=((kind, 2),), hold_s=0.02, pause_s=1.0))
    link.send(1, 2, 3)
    return link


def test_without_a_fault_nothing_changes() -> None:
    link = Link(LinkFaults())
    link.send(1, 2, 3)
    assert link.arrived() == [(b"1", PAYLOAD), (b"2", PAYLOAD), (b"3", PAYLOAD)]
    assert link.released == [1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "came"),
    [
        (FaultKind.DROP, [1, 3]),
        (FaultKind.DUPLICATE, [1, 2, 2, 3]),
        (FaultKind.REORDER, [1, 3, 2]),
        (FaultKind.DELAY, [1, 3]),
        (FaultKind.STALL, [1]),
        (FaultKind.DISCONNECT, [1]),
        (FaultKind.TRUNCATE, [1, 2, 3]),
        (FaultKind.CORRUPT, [1, 2, 3]),
    ],
)
def test_which_frames_come_and_in_which_order(kind: FaultKind, came: list[int]) -> None:
    link = second(kind)
    assert link.headers() == came
    assert link.near.gauges()["kv_faults_injected_total"] == 1
    assert [event.route for event in link.lost] == ([link.route] if kind is FaultKind.DISCONNECT else [])


def test_a_delayed_frame_comes_once_its_time_is_over() -> None:
    link = second(FaultKind.DELAY)
    assert link.headers() == [1, 3]
    assert link.near.next_due_s() == pytest.approx(0.02)
    link.clock.advance(0.02)
    assert link.headers() == [2]


def test_a_stalled_connection_loses_nothing_and_keeps_order() -> None:
    link = second(FaultKind.STALL)
    link.clock.advance(0.5)
    link.send(4)
    assert link.headers() == [1]
    link.clock.advance(0.5)
    assert link.headers() == [2, 3, 4]
    link.send(5)
    assert link.headers() == [5]


def test_a_reordered_last_frame_comes_by_itself_and_only_once() -> None:
    link = Link(LinkFaults(at=((FaultKind.REORDER, 1),), hold_s=0.02))
    link.send(1)
    assert link.headers() == []
    link.clock.advance(0.02)
    assert link.headers() == [1]
    link.send(2)
    assert link.headers() == [2]


def test_a_truncated_frame_is_shorter_and_a_corrupt_one_differs_by_a_bit() -> None:
    _, (_, cut), _ = second(FaultKind.TRUNCATE).arrived()
    assert 0 < len(cut) < len(PAYLOAD)
    assert cut == PAYLOAD[: len(cut)]
    _, (_, flipped), _ = second(FaultKind.CORRUPT).arrived()
    assert sum((a ^ b).bit_count() for a, b in zip(flipped, PAYLOAD, strict=True)) == 1


@pytest.mark.parametrize("kind", FaultKind)
def test_every_buffer_is_given_back_once(kind: FaultKind) -> None:
    link = Link(LinkFaults(rates=((kind, 0.5),), seed=3))
    link.send(*range(20))
    for _ in range(3):
        link.clock.advance(1.0)
        link.arrived()
    link.near.close()
    sent = sorted(link.released)
    assert sent == list(range(len(sent))), "a buffer was kept, or given back twice"
    assert len(sent) == 20 or kind is FaultKind.DISCONNECT
    assert link.near.gauges()["kv_held_frames"] == 0


def test_the_same_seed_gives_the_same_faults() -> None:
    faults = LinkFaults(rates=((FaultKind.DROP, 0.3), (FaultKind.CORRUPT, 0.3)), seed=7)
    first, again = ([FaultPlan(faults).next() for _ in range(1)] for _ in range(2))
    plan, other = FaultPlan(faults), FaultPlan(faults)
    drawn = [plan.next() for _ in range(500)]
    assert drawn == [other.next() for _ in range(500)]
    assert first == again
    assert 100 < drawn.count(FaultKind.DROP) < 200
    assert 100 < drawn.count(FaultKind.CORRUPT) < 200
