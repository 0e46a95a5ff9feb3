"""How the ZeroMQ channel learns that libzmq is done with a payload."""

import threading
import time
from functools import partial

import pytest

from pdserve.kvtransfer import zeromq
from pdserve.kvtransfer.channel import Connected
from pdserve.kvtransfer.zeromq import ZeroMqChannel


@pytest.mark.parametrize(("num_buffers", "num_frames"), [(16, 4), (2, 2), (1, 1)])
def test_a_released_payload_ends_the_poll(monkeypatch: pytest.MonkeyPatch, num_buffers: int, num_frames: int) -> None:
    """It was noticed a millisecond later at best, so short frames went at four a millisecond, whatever the link could do.

    A sender with one or two buffers waits for each: it lost up to half of its rate when only three ended the poll.
    """
    for name in ("_FIRST_REAP_S", "_LAST_REAP_S"):
        monkeypatch.setattr(zeromq, name, 5.0)
    near, far = ZeroMqChannel(num_buffers=num_buffers), ZeroMqChannel()
    wakes: list[int] = []
    wake = near.wake

    def told() -> None:
        wakes.append(len(wakes))
        wake()

    monkeypatch.setattr(near, "wake", told)
    released: list[int] = []
    try:
        route = near.connect(far.listen("127.0.0.1", 0))
        while not any(isinstance(event, Connected) for event in near.poll(5.0)):
            far.poll(0.01)
        for number in range(num_frames):
            payload = memoryview(bytearray(256 << 10))
            assert near.send_data(route, b"header", payload, partial(released.append, number))
        deadline_s = time.monotonic() + 20.0
        while len(wakes) < num_frames and time.monotonic() < deadline_s:
            far.poll(0.01)
        assert len(wakes) == num_frames
        near.poll(5.0)
        assert released == list(range(num_frames))
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize("num_frames", [1, 2])
def test_a_few_payloads_are_looked_after_though_nobody_tells(monkeypatch: pytest.MonkeyPatch, num_frames: int) -> None:
    """A poll without a deadline ends for them: else a sender with as many buffers would wait until something else happens."""
    near, far = ZeroMqChannel(), ZeroMqChannel()
    wake, is_over, released = near.wake, threading.Event(), list[int]()
    try:
        route = near.connect(far.listen("127.0.0.1", 0))
        while not any(isinstance(event, Connected) for event in near.poll(5.0)):
            far.poll(0.01)
        monkeypatch.setattr(near, "wake", lambda: None)
        for number in range(num_frames):
            payload = memoryview(bytearray(256 << 10))
            assert near.send_data(route, b"header", payload, partial(released.append, number))

        def look() -> None:
            while len(released) < num_frames and not is_over.is_set():
                near.poll(None)

        looker = threading.Thread(target=look)
        looker.start()
        deadline_s = time.monotonic() + 10.0
        while looker.is_alive() and time.monotonic() < deadline_s:
            far.poll(0.01)
        num_released = len(released)
        is_over.set()
        wake()
        looker.join()
        assert num_released == num_frames
    finally:
        near.close()
        far.close()
