"""Both services over real channels: what nodes see."""

from collections.abc import Callable, Iterator

import pytest

from pdserve.kvtransfer import Acked, Received
from pdserve.kvtransfer.channel import Channel
from pdserve.kvtransfer.inprocess import InProcessNetwork
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import FIRST, Pair


@pytest.fixture(params=["inprocess", "zeromq"])
def make_channel(request: pytest.FixtureRequest) -> Callable[[], Channel]:
    return ZeroMqChannel if request.param == "zeromq" else InProcessNetwork().channel


@pytest.fixture
def pair(make_channel: Callable[[], Channel]) -> Iterator[Pair]:
    made = Pair.make(make_channel).start()
    yield made
    made.stop()


def test_a_transfer_arrives_whole(pair: Pair) -> None:
    transfer_id = pair.open()
    pair.send_all(transfer_id)
    pair.closed(transfer_id)
    assert pair.sent.kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
    assert pair.received.kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]
    received = pair.received.wait(Received)
    assert received.tokens == FIRST
    assert received.durations_s == {"prefill.compute": 0.5}
    assert received.stats.kv_bytes == pair.source.layout.range_bytes(range(4), 20)
    assert pair.sent.wait(Acked).stats.kv_bytes == received.stats.kv_bytes
    pair.sink.check(transfer_id, 20)
