"""What tests of the NIXL channel do with its ends."""

import time
from collections.abc import Callable

import pytest

from pdserve.kvtransfer.channel import Arrived, Channel, ChannelEvent
from pdserve.kvtransfer.nixl_engine import INSTALL, installed_package

WAIT_S = 20.0
NEEDS_NIXL = pytest.mark.skipif(installed_package() is None, reason=f"NIXL is not installed ({INSTALL})")


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
