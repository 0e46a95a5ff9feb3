"""Both services over real channels: what nodes see."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from pdserve.core.clock import SystemClock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import AddressInUse
from pdserve.core.ids import new_incarnation
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.link_faults import FaultKind, LinkFaults
from pdserve.kvtransfer import (
    Acked,
    FinishedEarly,
    Granted,
    KvReceiveService,
    Opened,
    PeerDown,
    PeerRefused,
    PeerUp,
    Received,
    ReceiveFailed,
    Reopened,
    SendClosed,
    SendFailed,
)
from pdserve.kvtransfer.channel import Channel
from pdserve.kvtransfer.faults import FaultyChannel
from pdserve.kvtransfer.inprocess import InProcessNetwork
from pdserve.kvtransfer.shared_channel import SharedMemoryChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import FIRST, BytesSink, Events, Pair, check_a_transfer_works, settings, wait_until

BIG = KvLayout((LayerLayout(8, 64, 64),) * 12, "float32")
"""4 KiB per token and layer; 12 layers of 512 tokens are 24 MiB."""


@pytest.fixture(params=["inprocess", "zeromq"])
def make_channel(request: pytest.FixtureRequest) -> Callable[[], Channel]:
    return ZeroMqChannel if request.param == "zeromq" else InProcessNetwork().channel


@pytest.fixture
def pair(make_channel: Callable[[], Channel]) -> Iterator[Pair]:
    made = Pair.make(make_channel).start()
    yield made
    made.stop()


def test_a_transfer_arrives_whole(pair: Pair) -> None:
    check_a_transfer_works(pair)
    received = pair.received.wait(Received)
    assert received.tokens == FIRST
    assert received.durations_s == {"prefill.compute": 0.5}
    assert received.stats.kv_bytes == pair.source.layout.range_bytes(range(4), 20)
    acked = pair.sent.wait(Acked)
    assert acked.stats.kv_bytes == received.stats.kv_bytes
    assert acked.stats.num_frames == received.stats.num_frames > 0
    assert acked.stats.exposed_s > 0


def test_many_large_transfers_at_once(make_channel: Callable[[], Channel]) -> None:
    """More bytes than window and staging hold, from several threads, in turns on one link."""
    mine = settings(layout=BIG, staging_bytes=2 << 20)
    theirs = settings(layout=BIG, window_bytes=3 << 20)
    pair = Pair.make(make_channel, mine, theirs).start()
    ids = [pair.open(128) for _ in range(4)]
    threads = [threading.Thread(target=pair.send_all, args=(transfer_id, 128)) for transfer_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for transfer_id in ids:
        pair.closed(transfer_id)
        assert pair.sent.kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
        pair.sink.check(transfer_id, 128)
    pair.stop()


def test_a_layer_is_sent_before_the_next_is_computed(make_channel: Callable[[], Channel]) -> None:
    pair = Pair.make(make_channel, settings(layout=BIG), settings(layout=BIG)).start()
    transfer_id = pair.open(128)

    def is_placed(layer: int) -> bool:
        return (layer, 127) in pair.sink.placed.get(transfer_id, {})

    for layer in range(BIG.num_layers):
        pair.sender.mark_ready(transfer_id, range(layer, layer + 1), range(128))
        wait_until(partial(is_placed, layer), f"layer {layer} is placed")
    pair.sender.commit(transfer_id, FIRST, {})
    pair.closed(transfer_id)
    assert pair.sent.kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
    pair.stop()


BREAKS_AT = {"sender": ((5, 12), ()), "receiver": ((), (3,))}
"""Frames of each side that a disconnect meets; in turn: HELLO, OPEN, DATA, COMMIT; and WELCOME, GRANT, beats, ACK.

What a receiver breaks its sender learns by the answer to its next frame, or, if payloads go through shared memory, by its lease.
"""


@pytest.mark.parametrize("transport", ["zeromq", "shared memory"])
@pytest.mark.parametrize("side", BREAKS_AT)
def test_a_connection_that_breaks_in_mid_transfer(transport: str, side: str, caplog: pytest.LogCaptureFixture) -> None:
    """The transfer goes on over the next one: the same ids, one grant, exact bytes, every buffer back, and it is told."""
    ends = iter(BREAKS_AT[side][::-1])

    def make() -> Channel:
        faults = LinkFaults(at=tuple((FaultKind.DISCONNECT, number) for number in next(ends)))
        inner = SharedMemoryChannel(ZeroMqChannel(), SystemClock()) if transport == "shared memory" else ZeroMqChannel()
        return FaultyChannel(inner, faults, SystemClock())

    # Few beats, since they are counted among the frames.
    mine, theirs = (
        settings(layout=BIG, beat_s=2.0, lease_s=6.0, transfer_idle_s=30.0, window_bytes=8 << 20) for _ in range(2)
    )
    pair = Pair.make(make, mine, theirs).start()
    transfer_id = pair.open(128)
    pair.send_all(transfer_id, 128)
    pair.closed(transfer_id)
    for events, kinds in (
        (pair.sent, ["Granted", "Acked", "SendClosed"]),
        (pair.received, ["Opened", "Received", "ReceiveClosed"]),
    ):
        assert [kind for kind in events.kinds(transfer_id) if kind != "Reopened"] == kinds
    pair.sink.check(transfer_id, 128)
    num_reopened = sum(isinstance(event, Reopened) for event in pair.sent.all)
    assert num_reopened >= 1
    assert pair.sender.gauges()["kv_reopened_total"] == num_reopened
    assert pair.sender.gauges()["kv_failed_total"] == pair.receiver.gauges()["kv_failed_total"] == 0
    assert caplog.text.count(f"transfer {transfer_id.hex()} goes on over a new connection") >= num_reopened
    pair.stop()


def test_busy_is_not_failure(pair: Pair) -> None:
    mine, theirs = pair.specs()
    pair.receiver.expect(theirs)
    pair.sender.open(mine)
    pair.received.wait(Opened)
    pair.receiver.refuse(mine.transfer_id)
    pair.closed(mine.transfer_id)
    failed = pair.sent.wait(SendFailed)
    assert (failed.reason, failed.busy) == ("kv_nack_busy", True)
    assert pair.received.kinds(mine.transfer_id) == ["Opened", "ReceiveClosed"]


@pytest.mark.parametrize("busy", [False, True])
def test_what_a_cancelled_or_aborted_transfer_says_of_failure(pair: Pair, busy: bool) -> None:
    """A decode node that evicts or drains what it receives says `busy`: the prefill node did nothing wrong."""
    cancelled = pair.open()
    pair.receiver.cancel(cancelled, "evicted", busy=busy)
    pair.closed(cancelled)
    failed = pair.sent.wait(SendFailed, lambda event: event.transfer_id == cancelled)
    assert (failed.reason, failed.detail, failed.busy) == ("peer_aborted", "evicted", busy)
    aborted = pair.open()
    pair.sender.abort(aborted, "draining", busy=busy)
    pair.closed(aborted)
    lost = pair.received.wait(ReceiveFailed, lambda event: event.transfer_id == aborted)
    assert (lost.reason, lost.detail, lost.busy) == ("peer_aborted", "draining", busy)
    with pytest.raises(ValueError, match="finished or busy"):
        pair.sender.abort(aborted, "stop", finished=True, busy=True)


def test_finished_at_the_first_token(pair: Pair) -> None:
    transfer_id = pair.open()
    pair.sender.abort(transfer_id, "stop", finished=True)
    pair.closed(transfer_id)
    pair.received.wait(FinishedEarly)
    assert "SendFailed" not in pair.sent.kinds(transfer_id)


@pytest.mark.parametrize("stage", ["opened", "granted", "streaming"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_each_side_gives_up_at_each_stage(pair: Pair, stage: str, side: str) -> None:
    mine, theirs = pair.specs()
    transfer_id = mine.transfer_id
    pair.receiver.expect(theirs)
    pair.sender.open(mine)
    pair.received.wait(Opened)
    if stage != "opened":
        pair.receiver.grant(transfer_id)
        pair.sent.wait(Granted)
    if stage == "streaming":
        pair.sender.mark_ready(transfer_id, range(4), range(10))
        wait_until(lambda: transfer_id in pair.sink.placed, "some KV is placed")
    if side == "sender":
        pair.sender.abort(transfer_id, "cancelled")
        pair.closed(transfer_id)
        assert pair.received.wait(ReceiveFailed).reason == "peer_aborted"
    else:
        pair.receiver.cancel(transfer_id, "cancelled")
        pair.closed(transfer_id)
        assert pair.sent.wait(SendFailed).reason == "peer_aborted"
    check_a_transfer_works(pair)


def test_a_pool_that_raises_fails_one_transfer_only(pair: Pair) -> None:
    for broken, reason in ((pair.source, "pack_failed"), (pair.sink, "kv_nack_place")):
        transfer_id = pair.open()
        broken.fails = True
        pair.send_all(transfer_id)
        pair.closed(transfer_id)
        broken.fails = False
        assert next(e.reason for e in pair.sent.of(transfer_id) if isinstance(e, SendFailed)) == reason
        check_a_transfer_works(pair)


def test_a_handler_that_raises_harms_nothing(make_channel: Callable[[], Channel]) -> None:
    pair = Pair.make(make_channel)

    def raising(event: object) -> None:
        pair.received(event)
        raise RuntimeError("the node is broken")

    pair.receiver = KvReceiveService(pair.receiver_settings, pair.sink, raising, make_channel=make_channel)
    pair.start()
    check_a_transfer_works(pair)
    pair.stop()


def test_different_nodes_are_refused_by_name(make_channel: Callable[[], Channel]) -> None:
    mine = settings()
    pair = Pair.make(make_channel, replace(mine, identity=replace(mine.identity, weight_digest="another"))).start(
        meet=False
    )
    pair.receiver.set_peers(frozenset({mine.incarnation}))
    pair.dial()
    assert pair.sent.wait(PeerRefused).fields == ("weight_digest",)
    assert pair.received.wait(PeerRefused).fields == ("weight_digest",)
    spec, _ = pair.specs()
    pair.sender.open(spec)
    assert pair.sent.wait(SendFailed).reason == "peer_refused"
    pair.stop()


def test_a_secret_on_both_sides(make_channel: Callable[[], Channel]) -> None:
    pair = Pair.make(make_channel, settings(secret=ClusterSecret(b"s")), settings(secret=ClusterSecret(b"s"))).start()
    check_a_transfer_works(pair)
    pair.stop()


def test_a_wrong_secret(make_channel: Callable[[], Channel]) -> None:
    pair = Pair.make(make_channel, settings(secret=ClusterSecret(b"s")), settings(secret=ClusterSecret(b"t"))).start(
        meet=False
    )
    pair.receiver.set_peers(frozenset({pair.sender_settings.incarnation}))
    pair.dial()
    assert pair.sent.wait(PeerRefused).fields == ("proof",)
    pair.stop()


def test_hello_before_the_routers_list_connects_as_soon_as_it_comes(pair: Pair) -> None:
    other = Pair.make(pair.sender._loop._make_channel)
    other.sender.start()
    other.sender.set_peers({pair.receiver_settings.incarnation: pair.receiver.endpoint})
    wait_until(lambda: pair.receiver.gauges()["kv_links"] == 2, "the HELLO is parked")
    assert other.sent.all == []
    both = frozenset({pair.sender_settings.incarnation, other.sender_settings.incarnation})
    pair.receiver.set_peers(both)
    other.sent.wait(PeerUp)
    pair.received.wait(PeerUp, lambda event: event.incarnation == other.sender_settings.incarnation)
    assert pair.receiver.gauges()["kv_links_up"] == 2
    assert other.sender.stop()
    pair.received.wait(PeerDown, lambda event: event.incarnation == other.sender_settings.incarnation)


def test_open_before_submit(pair: Pair) -> None:
    mine, theirs = pair.specs()
    pair.sender.open(mine)
    wait_until(lambda: pair.receiver.gauges()["kv_parked_opens"] == 1, "the OPEN is parked")
    pair.receiver.expect(theirs)
    pair.received.wait(Opened)
    pair.receiver.grant(mine.transfer_id)
    pair.send_all(mine.transfer_id)
    pair.closed(mine.transfer_id)
    assert pair.received.kinds(mine.transfer_id)[1] == "Received"


def test_the_receiver_dies_and_another_takes_its_place(make_channel: Callable[[], Channel]) -> None:
    pair = Pair.make(make_channel).start()
    transfer_id = pair.open()
    assert pair.receiver.stop()
    assert pair.sent.wait(SendFailed).reason in ("peer_lost", "kv_nack_shutdown")
    pair.sent.wait(SendClosed, lambda event: event.transfer_id == transfer_id)
    pair.sent.wait(PeerDown)
    port = int(pair.receiver.endpoint.rpartition(":")[2])
    pair.receiver_settings = replace(pair.receiver_settings, incarnation=new_incarnation())
    pair.received = Events()
    pair.receiver = KvReceiveService(
        pair.receiver_settings, pair.sink, pair.received, port=port, make_channel=make_channel
    )
    pair.receiver.start()
    pair.receiver.set_peers(frozenset({pair.sender_settings.incarnation}))
    pair.sent.wait(PeerRefused, lambda event: event.fields == ("incarnation",))
    pair.dial()
    pair.sent.wait(PeerUp, num=2)
    check_a_transfer_works(pair)
    pair.stop()


def test_the_sender_dies(make_channel: Callable[[], Channel]) -> None:
    """Its ABORT may be lost with the connection: then the wait for the next one ends it."""
    mine, theirs = (settings(connect_wait_s=0.5, lease_s=1.0, beat_s=0.2) for _ in range(2))
    pair = Pair.make(make_channel, mine, theirs).start()
    transfer_id = pair.open()
    assert pair.sender.stop()
    failed = pair.received.wait(ReceiveFailed)
    assert failed.transfer_id == transfer_id
    assert pair.received.kinds(transfer_id)[-1] == "ReceiveClosed"
    assert pair.sent.kinds(transfer_id)[-2:] == ["SendFailed", "SendClosed"]
    pair.received.wait(PeerDown)
    wait_until(lambda: pair.receiver.gauges()["kv_links"] == 0, "the link is gone")
    pair.check_idle()
    assert pair.receiver.stop()


def test_too_many_waiting_marks_fail_by_name(make_channel: Callable[[], Channel]) -> None:
    pair = Pair.make(make_channel, settings(max_waiting_marks=8)).start()
    transfer_id = pair.open()
    with pair.sender._loop.lock:  # the I/O thread cannot take a command meanwhile
        for token in range(20):
            pair.sender.mark_ready(transfer_id, range(1), range(token, token + 1))
    pair.closed(transfer_id)
    assert pair.sent.wait(SendFailed).reason == "mark_overflow"
    check_a_transfer_works(pair)
    pair.stop()


def test_a_busy_port_is_a_named_error(make_channel: Callable[[], Channel]) -> None:
    pair = Pair.make(make_channel).start()
    port = int(pair.receiver.endpoint.rpartition(":")[2])
    events = Events()
    second = KvReceiveService(settings(), BytesSink(BIG), events, port=port, make_channel=make_channel)
    with pytest.raises(AddressInUse):
        second.start()
    _, theirs = pair.specs()
    second.expect(theirs)
    assert events.kinds(theirs.transfer_id) == ["ReceiveFailed", "ReceiveClosed"], (
        "nothing waits for a thread that is not"
    )
    assert second.stop()
    pair.stop()


def test_the_advertised_host_stands_in_the_endpoint() -> None:
    service = KvReceiveService(settings(), BytesSink(BIG), Events(), advertise="decode-0.example")
    assert service.endpoint == ""
    service.start()
    assert service.endpoint.startswith("tcp://decode-0.example:")
    assert service.stop()


def test_stop_without_start_and_twice() -> None:
    pair = Pair.make(ZeroMqChannel)
    assert pair.sender.stop()
    pair = Pair.make(ZeroMqChannel).start()
    assert pair.sender.stop()
    assert pair.sender.stop()
    assert pair.receiver.stop()


def test_no_thread_is_left() -> None:
    pair = Pair.make(ZeroMqChannel).start()
    check_a_transfer_works(pair)
    pair.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pdserve-kv")]
