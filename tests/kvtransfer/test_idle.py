"""Idle connections: those that the network drops are made anew before anybody needs them, and waiting costs nothing."""

import contextlib
import select
import socket
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
from pdserve.kvtransfer.shaping import ShapedChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import Pair, check_a_transfer_works, settings


def quick() -> LinkSettings:
    """Settings under which silence is soon noticed."""
    return settings(lease_s=0.6, beat_s=0.1)


class Wire:
    """A TCP relay that can close its connections, or lose all they carry without a word, as a firewall does to idle ones."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._muted: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_over = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._door.getsockname()[1]}"

    def drop(self) -> None:
        """Close all present connections."""
        with self._lock:
            for each in (end for pair in self._pairs for end in pair):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mute(self) -> None:
        """Carry nothing more on the present connections, and close none."""
        with self._lock:
            self._muted |= {end for pair in self._pairs for end in pair}

    def close(self) -> None:
        self._is_over = True
        self._wake_out.send(b"x")
        self._thread.join(30)
        for each in (self._door, self._wake_in, self._wake_out, *(end for pair in self._pairs for end in pair)):
            each.close()

    def _relay(self) -> None:
        while not self._is_over:
            with self._lock:
                other = {a: b for pair in self._pairs for a, b in (pair, pair[::-1])}
            for ready in select.select([self._door, self._wake_in, *other], [], [])[0]:
                if ready is self._door:
                    near = self._door.accept()[0]
                    with self._lock:
                        self._pairs.append((near, socket.create_connection(self._to)))
                elif ready is not self._wake_in:
                    self._carry(ready, other[ready])

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        content = b""
        with contextlib.suppress(OSError):
            content = source.recv(1 << 16)
        if content and source in self._muted:
            return
        with contextlib.suppress(OSError):
            if content:
                target.sendall(content)
                return
            target.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._pairs = [pair for pair in self._pairs if source not in pair]
        source.close()
        target.close()


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


@pytest.mark.parametrize("link", ["plain", "shaped", "faulty"])
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
