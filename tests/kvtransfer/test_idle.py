"""Idle connections: those that the network drops are made anew before anybody needs them, and waiting costs nothing."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pdserve.core.clock import SystemClock
from pdserve.core.link_faults import LinkFaults
from pdserve.core.link_shape import LinkShape
from pdserve.kvtransfer import LinkSettings, PeerDown, PeerUp
from pdserve.kvtransfer.channel import Channel, ChannelEvent
from pdserve.kvtransfer.faults import FaultyChannel
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.nixl_engine import NixlAgent
from pdserve.kvtransfer.shaping import ShapedChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nixl_ends import NEEDS_NIXL
from tests.kvtransfer.nodes import Pair, check_a_transfer_works, settings
from tests.kvtransfer.relay import Wire


def quick() -> LinkSettings:
    """Settings under which silence is soon noticed."""
    return settings(lease_s=0.6, beat_s=0.1)


@pytest.fixture
def wired() -> Iterator[tuple[Pair, Wire]]:
    """Two ends whose connection runs over a relay."""
    pair = Pair.make(ZeroMqChannel, quick(), quick()).start(meet=False)
    wire = Wire(int(pair.receiver.endpoint.rpartition(":")[2]))
    pair.receiver.set_peers(frozenset({pair.sender_settings.incarnation}))
    pair.sender.set_peers({pair.receiver_settings.incarnation: wire.address})
    for events in (pair.sent, pair.received):
        events.wait(PeerUp)
    yield pair, wire
    pair.stop()
    wire.close()


@pytest.mark.parametrize("how", ["drop", "mute"])
def test_the_first_transfer_after_an_idle_connection_was_lost(wired: tuple[Pair, Wire], how: str) -> None:
    """Failure class 25: the loss is noticed while nothing is under way, and a transfer that comes then waits for the new link."""
    pair, wire = wired
    check_a_transfer_works(pair)
    (wire.drop if how == "drop" else wire.mute)()
    pair.sent.wait(PeerDown)
    pair.received.wait(PeerDown)
    check_a_transfer_works(pair)
    pair.sent.wait(PeerUp, num=2)


class CountingChannel(ZeroMqChannel):
    """Counts the turns of the loop."""

    num_polls = 0

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        self.num_polls += 1
        return super().poll(timeout_s)


@pytest.mark.parametrize("link", ["plain", "shaped", "faulty", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_an_idle_corridor_wakes_for_beats_only(link: str) -> None:
    """Its CPU is that of its turns: two beats each way per second, and nothing in between."""
    counters: list[CountingChannel] = []

    def make() -> Channel:
        counters.append(CountingChannel())
        match link:
            case "shaped":
                return ShapedChannel(counters[-1], LinkShape(1e10, 0.002, 0.001), SystemClock())
            case "faulty":
                return FaultyChannel(counters[-1], LinkFaults(), SystemClock())
            case "nixl":
                return NixlChannel(counters[-1], NixlAgent(), SystemClock())
        return counters[-1]

    pair = Pair.make(make).start()
    check_a_transfer_works(pair)
    num_before, began_s, cpu_before_s = num_polls(counters), time.monotonic(), time.process_time()
    idle_for(lambda: num_polls(counters) - num_before >= 24)
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_before_s
    print(f"{link}: {num_polls(counters) - num_before} turns in {took_s:.2f} s, {100 * cpu_s / took_s:.2f} % CPU")  # noqa: T201
    # Each end beats twice a second: it wakes to send one and to take one; a shaped end once more, to let one go.
    per_second = (num_polls(counters) - num_before) / took_s
    assert per_second <= (14 if link == "shaped" else 10), f"{per_second:.1f} turns per second"
    pair.stop()


def num_polls(counters: list[CountingChannel]) -> int:
    return sum(counter.num_polls for counter in counters)


def idle_for(is_over: Callable[[], bool]) -> None:
    """Wait without using the CPU that is measured."""
    over = threading.Event()
    while not is_over() and not over.wait(0.25):
        pass
