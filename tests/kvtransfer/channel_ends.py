"""What tests of channels with memory of their own do with their two ends."""

import time
from collections.abc import Callable

from pdserve.kvtransfer.channel import Arrived, Channel, ChannelEvent, Connected, LendingChannel, Route

WAIT_S = 20.0


def polled(*channels: Channel, until: Callable[[list[ChannelEvent]], bool]) -> list[ChannelEvent]:
    """Poll all in turn until what the first one told is enough."""
    told: list[ChannelEvent] = []
    deadline_s = time.monotonic() + WAIT_S
    while not until(told):
        assert time.monotonic() < deadline_s, told
        for channel in channels:
            events = channel.poll(0.001)
            told += events if channel is channels[0] else []
    return told


def has(kind: type[ChannelEvent], num: int = 1) -> Callable[[list[ChannelEvent]], bool]:
    return lambda told: sum(isinstance(event, kind) for event in told) >= num


def frames_of(told: list[ChannelEvent]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in event.frames] for event in told if isinstance(event, Arrived)]


def meet(listener: Channel, dialler: Channel) -> Route:
    """Connect, and return the dialler's route."""
    route = dialler.connect(listener.listen("127.0.0.1", 0))
    polled(dialler, listener, until=has(Connected))
    return route


def send_lent(listener: Channel, dialler: Channel, route: Route, num: int) -> int:
    """Send `num` payloads, each packed into what the dialler lends, and see each arrive and come back; return their bytes."""
    assert isinstance(dialler, LendingChannel)
    released: list[int] = []
    for number in range(num):
        lent = dialler.lend(route, 1000 + number)
        assert lent is not None
        lent[:] = bytes([number]) * len(lent)
        assert dialler.send_data(route, b"h%d" % number, lent, lambda n=number: released.append(n))  # type: ignore[misc]  # default binds
        assert number not in released, "released before the other end took it"
        told = polled(listener, dialler, until=has(Arrived))
        assert frames_of(told) == [[b"h%d" % number, bytes([number]) * (1000 + number)]]
        polled(dialler, listener, until=lambda _, n=number: n in released)  # type: ignore[misc]  # default binds
    assert released == list(range(num))
    return sum(1000 + number for number in released)
