"""How the ZeroMQ channel learns that libzmq is done with a payload."""

import threading
import time
from functools import partial

import pytest
import zmq

from pdserve.kvtransfer.channel import Connected
from pdserve.kvtransfer.lent_payloads import LentPayloads
from pdserve.kvtransfer.zeromq import ZeroMqChannel


@pytest.mark.parametrize(("num_buffers", "num_lent", "num_told"), [(16, 4, 2), (16, 2, 0), (2, 2, 1), (1, 1, 1)])
def test_who_may_wait_for_one_of_the_payloads_is_told(num_buffers: int, num_lent: int, num_told: int) -> None:
    """It was noticed a millisecond later at best, so short frames went at four a millisecond, whatever the link could do.

    A sender with one or two buffers waits for each: it lost up to half of its rate when only three ended the poll.
    """
    wakes: list[int] = []
    released: list[int] = []
    lent = LentPayloads(num_buffers, lambda: wakes.append(len(released)))
    trackers = [zmq.MessageTracker(threading.Event()) for _ in range(num_lent)]
    views = []
    for number, tracker in enumerate(trackers):
        view, sign = lent.view(memoryview(bytearray(8)))
        lent.add(tracker, partial(released.append, number), sign)
        views.append(view)
    del view
    assert (wakes, lent.reap(), released) == ([], False, [])
    for number, tracker in enumerate(trackers):
        # As pyzmq's thread does: it marks the tracker, then lets the payload go.
        for event in tracker.events:
            event.set()
        views.pop(0)
        assert lent.reap()
        assert released == list(range(number + 1))
    assert len(wakes) == num_told
    assert not lent.reap()


def test_a_released_payload_ends_a_poll_that_nothing_else_would_end(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ZeroMqChannel(num_buffers=1), ZeroMqChannel()
    monkeypatch.setattr(LentPayloads, "next_look_s", lambda _: None)
    released = threading.Event()
    try:
        route = near.connect(far.listen("127.0.0.1", 0))
        while not any(isinstance(event, Connected) for event in near.poll(5.0)):
            far.poll(0.01)
        near.trust(route)
        assert near.send_data(route, b"header", memoryview(bytearray(256 << 10)), released.set)

        def look() -> None:
            while not released.is_set():
                near.poll(None)

        looker = threading.Thread(target=look)
        looker.start()
        looker.join(30.0)
        told = released.is_set()
        released.set()
        near.wake()
        looker.join()
        assert told
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
