"""What every channel promises, run on every channel."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

import pytest
import zmq

from pdserve.core.clock import SystemClock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import AddressInUse
from pdserve.core.link_faults import LinkFaults
from pdserve.core.link_shape import LinkShape
from pdserve.kvtransfer.channel import MAX_BATCH, Arrived, Channel, ChannelEvent, Connected, Lost, Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.curve import listener_keys
from pdserve.kvtransfer.faults import FaultyChannel
from pdserve.kvtransfer.holding import HoldingChannel
from pdserve.kvtransfer.inprocess import InProcessNetwork
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.nixl_engine import INSTALL, NixlAgent, installed_package
from pdserve.kvtransfer.shaping import ShapedChannel
from pdserve.kvtransfer.shared_channel import SharedMemoryChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel

WAIT_S = 30.0
KEYS = listener_keys(b"the cluster secret of the suite")
E = TypeVar("E", Arrived, Connected, Lost)


class MakeChannel(Protocol):
    def __call__(self) -> Channel: ...


END_OF: dict[int, "End"] = {}
"""Every end of the running test."""


class End:
    """One end, with everything that happened at it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.events: list[ChannelEvent] = []
        END_OF[id(channel)] = self

    def wait(self, kind: type[E], num: int = 1) -> E:
        """Poll until `num` events of a kind came; return the last of them. Others that hold or answer are polled too."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            found = [event for event in self.events if isinstance(event, kind)]
            if len(found) >= num:
                return found[num - 1]
            assert time.monotonic() < deadline_s, f"no {kind.__name__}: {self.events}"
            kinds = (HoldingChannel, SharedMemoryChannel, NixlChannel)
            holders = [end for end in END_OF.values() if end is not self and isinstance(end.channel, kinds)]
            batch = self.channel.poll(0.001 if holders else 1.0)
            assert len(batch) <= MAX_BATCH
            self.events += batch
            for end in holders:
                end.events += end.channel.poll(0.0)


def decorated(channel: Channel, decorator: str) -> Channel:
    """Return the channel as it is, over a slow link, or through a fault plan that holds no fault."""
    match decorator:
        case "shaped":
            return ShapedChannel(channel, LinkShape(2e10, 0.0005, 0.0002), SystemClock())
        case "faulty":
            return FaultyChannel(channel, LinkFaults(), SystemClock())
        case "shared":
            assert isinstance(channel, ZeroMqChannel)
            return SharedMemoryChannel(channel, SystemClock())
        case "nixl":
            return NixlChannel(channel, NixlAgent(), SystemClock(), ClusterSecret(b"the cluster secret of the suite"))
    return channel


NIXL = pytest.param(
    "zeromq-nixl",
    marks=pytest.mark.skipif(installed_package() is None, reason=f"NIXL is not installed ({INSTALL})"),
)


@pytest.fixture(
    params=["inprocess", "zeromq", "inprocess-shaped", "zeromq-shaped", "zeromq-faulty", "curve", "zeromq-shared", NIXL]
)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Channel]]:
    network, made = InProcessNetwork(), list[Channel]()
    transport, _, decorator = request.param.partition("-")

    def factory() -> Channel:
        inner = network.channel() if transport == "inprocess" else ZeroMqChannel(KEYS if transport == "curve" else None)
        made.append(decorated(inner, decorator))
        return made[-1]

    END_OF.clear()
    yield factory
    for channel in made:
        channel.close()
    END_OF.clear()


@pytest.fixture
def ends(make: MakeChannel) -> tuple[End, End, Route, Route]:
    """Listener and dialler, connected, and the route as each of them names it."""
    listener, dialler = End(make()), End(make())
    there = dialler.channel.connect(listener.channel.listen("127.0.0.1", 0))
    assert dialler.wait(Connected).route == there
    assert dialler.channel.send(there, b"hello")
    here = listener.wait(Arrived).route
    return listener, dialler, here, there


def bodies(end: End) -> list[list[bytes]]:
    return [[bytes(frame) for frame in event.frames] for event in end.events if isinstance(event, Arrived)]


def test_messages_arrive_in_order_both_ways(ends: tuple[End, End, Route, Route]) -> None:
    listener, dialler, here, there = ends
    for number in range(200):
        assert dialler.channel.send(there, b"%d" % number)
        assert listener.channel.send(here, b"%d" % -number)
    listener.wait(Arrived, 201)
    dialler.wait(Arrived, 200)
    assert bodies(listener)[1:] == [[b"%d" % number] for number in range(200)]
    assert bodies(dialler) == [[b"%d" % -number] for number in range(200)]


def test_data_arrives_whole_and_its_buffer_is_released_once(ends: tuple[End, End, Route, Route]) -> None:
    listener, dialler, _, there = ends
    released: list[int] = []
    for number in range(8):
        payload = bytearray([number]) * MAX_FRAME_BYTES
        assert dialler.channel.send_data(
            there, b"header %d" % number, memoryview(payload), partial(released.append, number)
        )
    listener.wait(Arrived, 9)
    deadline_s = time.monotonic() + WAIT_S
    while len(released) < 8:
        assert time.monotonic() < deadline_s
        dialler.events += dialler.channel.poll(0.01)
    assert sorted(released) == list(range(8))
    assert bodies(listener)[1:] == [[b"header %d" % n, bytes([n]) * MAX_FRAME_BYTES] for n in range(8)]


def test_a_released_buffer_may_be_used_again(ends: tuple[End, End, Route, Route]) -> None:
    listener, dialler, _, there = ends
    payload = bytearray(MAX_FRAME_BYTES)
    for number in range(12):
        free = threading.Event()
        payload[:] = bytes([number]) * MAX_FRAME_BYTES
        assert dialler.channel.send_data(there, b"h", memoryview(payload), free.set)
        deadline_s = time.monotonic() + WAIT_S
        while not free.is_set():
            assert time.monotonic() < deadline_s
            dialler.events += dialler.channel.poll(0.01)
    listener.wait(Arrived, 13)
    assert [frames[1][0] for frames in bodies(listener)[1:]] == list(range(12))
    assert all(len(set(frames[1])) == 1 for frames in bodies(listener)[1:])


def test_close_releases_what_is_still_lent(ends: tuple[End, End, Route, Route]) -> None:
    _, dialler, _, there = ends
    released: list[int] = []
    sent = 0
    for number in range(20):
        sent += dialler.channel.send_data(
            there, b"h", memoryview(bytearray(MAX_FRAME_BYTES)), partial(released.append, number)
        )
    dialler.channel.close()
    assert sorted(released) == list(range(sent))


def test_the_listener_learns_of_a_lost_route_after_its_messages(ends: tuple[End, End, Route, Route]) -> None:
    listener, dialler, here, there = ends
    dialler.channel.send(there, b"last words")
    listener.wait(Arrived, 2)
    dialler.channel.disconnect(there)
    assert listener.wait(Lost).route == here
    assert isinstance(listener.events[-1], Lost)
    assert not listener.channel.send(here, b"too late")


def test_the_dialler_learns_of_a_lost_route(ends: tuple[End, End, Route, Route]) -> None:
    listener, dialler, _, there = ends
    listener.channel.close()
    assert dialler.wait(Lost).route == there


def test_nobody_listens(make: MakeChannel) -> None:
    listener, dialler = End(make()), End(make())
    address = listener.channel.listen("127.0.0.1", 0)
    listener.channel.close()
    route = dialler.channel.connect(address)
    assert dialler.wait(Lost).route == route
    assert not any(isinstance(event, Connected) for event in dialler.events)
    dialler.channel.disconnect(route)
    assert not dialler.channel.send(route, b"into the void")


def test_an_address_that_is_none(make: MakeChannel) -> None:
    dialler = End(make())
    route = dialler.channel.connect("nonsense://nowhere")
    assert dialler.wait(Lost).route == route


def test_a_second_connection_is_a_new_route(make: MakeChannel) -> None:
    listener, dialler = End(make()), End(make())
    address = listener.channel.listen("127.0.0.1", 0)
    for number in (1, 2):
        route = dialler.channel.connect(address)
        dialler.wait(Connected, number)
        dialler.channel.send(route, b"%d" % number)
        listener.wait(Arrived, number)
        dialler.channel.disconnect(route)
        listener.wait(Lost, number)
    routes = [event.route for event in listener.events if isinstance(event, Arrived)]
    assert routes == [event.route for event in listener.events if isinstance(event, Lost)]
    assert len(set(routes)) == 2


def test_two_diallers_do_not_mix(make: MakeChannel) -> None:
    listener = End(make())
    address = listener.channel.listen("127.0.0.1", 0)
    diallers = [End(make()) for _ in range(3)]
    for number, dialler in enumerate(diallers):
        route = dialler.channel.connect(address)
        dialler.wait(Connected)
        dialler.channel.send(route, b"%d" % number)
    listener.wait(Arrived, 3)
    for event in [event for event in listener.events if isinstance(event, Arrived)]:
        listener.channel.send(event.route, b"you are %s" % bytes(event.frames[0]))
    for number, dialler in enumerate(diallers):
        assert bytes(dialler.wait(Arrived).frames[0]) == b"you are %d" % number
    diallers[1].channel.close()
    lost = listener.wait(Lost)
    arrived = {bytes(event.frames[0]): event.route for event in listener.events if isinstance(event, Arrived)}
    assert lost.route == arrived[b"1"]


def test_a_busy_address_is_a_named_error(make: MakeChannel) -> None:
    first, second = make(), make()
    port = int(first.listen("127.0.0.1", 0).rpartition(":")[2])
    with pytest.raises(AddressInUse):
        second.listen("127.0.0.1", port)


def test_wake_ends_a_poll_from_another_thread(make: MakeChannel) -> None:
    channel = make()
    polled = threading.Event()

    def poll() -> None:
        channel.poll(None)
        polled.set()

    thread = threading.Thread(target=poll)
    thread.start()
    channel.wake()
    assert polled.wait(WAIT_S)
    thread.join()


def test_a_wake_before_the_poll_is_not_lost(make: MakeChannel) -> None:
    channel = make()
    channel.wake()
    channel.wake()
    assert channel.poll(WAIT_S) == []


def test_wake_after_close_is_harmless(make: MakeChannel) -> None:
    channel = make()
    channel.listen("127.0.0.1", 0)
    channel.close()
    channel.wake()
    channel.close()


def test_an_unknown_route_cannot_be_sent_on(ends: tuple[End, End, Route, Route]) -> None:
    listener, dialler, _, _ = ends
    for end in (listener, dialler):
        assert not end.channel.send(Route(b"unknown"), b"x")
        assert not end.channel.send_data(Route(b"unknown"), b"x", memoryview(bytearray(8)), lambda: None)


def test_a_peer_that_reads_nothing_fills_a_bounded_queue(ends: tuple[End, End, Route, Route]) -> None:
    _, dialler, _, there = ends
    sent = 0
    while dialler.channel.send(there, bytes(1000)):
        sent += 1
        assert sent < 200_000, "the queue has no bound"


def test_the_options_of_live_zeromq_sockets() -> None:
    """Options that are misspelt or overridden are silent, so they are read back."""
    with closing(ZeroMqChannel()) as listener, closing(ZeroMqChannel()) as dialler:
        route = dialler.connect(listener.listen("127.0.0.1", 0))
        assert listener._listener is not None
        router, dealer = listener._listener.socket, dialler._dialled[route].socket
        assert dealer.getsockopt(zmq.RECONNECT_IVL) == -1, "a silent reconnection could reach another process"
        assert dealer.getsockopt(zmq.IMMEDIATE) == 1
        assert dealer.getsockopt(zmq.CONNECT_TIMEOUT) == 3000
        assert router.getsockopt_string(zmq.ZAP_DOMAIN).rstrip("\0") == "pdserve"
        for each in (router, dealer):
            assert each.getsockopt(zmq.LINGER) == 0
            assert each.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES
            assert each.getsockopt(zmq.SNDHWM) == 4096
