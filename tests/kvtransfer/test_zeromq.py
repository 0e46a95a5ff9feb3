"""What the ZeroMQ channel must not take libzmq's word for."""

from contextlib import closing

import pytest

from pdserve.kvtransfer import zeromq
from pdserve.kvtransfer.channel import Arrived, Connected
from pdserve.kvtransfer.zeromq import ZeroMqChannel


def polled(*channels: ZeroMqChannel, kind: type[Arrived | Connected]) -> Arrived | Connected:
    """Poll all in turn until the first one told an event of this kind."""
    for _ in range(2000):
        for event in channels[0].poll(0.01):
            if isinstance(event, kind):
                return event
        for other in channels[1:]:
            other.poll(0.0)
    raise AssertionError(f"no {kind.__name__}")


def test_a_socket_that_is_said_to_be_readable_and_is_empty_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there may go with its peer, between asking and receiving: then the I/O loop, and all transfers, would end."""
    monkeypatch.setattr(zeromq, "_is_readable", lambda socket: True)
    with closing(ZeroMqChannel()) as near, closing(ZeroMqChannel()) as far:
        route = near.connect(far.listen("127.0.0.1", 0))
        polled(near, far, kind=Connected)
        assert near.send(route, b"hello")
        arrived = polled(far, near, kind=Arrived)
        assert isinstance(arrived, Arrived)
        assert [bytes(frame) for frame in arrived.frames] == [b"hello"]
