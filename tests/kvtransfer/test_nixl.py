"""Payloads by NIXL: the proof, what happens without it, what a lost or stopped peer leaves. UCX runs on the CPU here."""

import struct
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from pdserve.core.clock import ManualClock, SystemClock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.kvtransfer import nixl_channel, nixl_reads
from pdserve.kvtransfer.channel import Arrived, ChannelEvent, Connected, Lost
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.nixl_channel import (
    ARENA_BYTES,
    ASK,
    CHALLENGE,
    DATA,
    FREE,
    HEAD_BYTES,
    NUM_SLOTS,
    OFFER,
    SEEN,
    UNSEEN,
    NixlChannel,
)
from pdserve.kvtransfer.nixl_engine import NixlAgent, NixlFault, RegisteredMemory
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.channel_ends import frames_of, has, meet, polled, send_lent
from tests.kvtransfer.nixl_ends import NEEDS_NIXL
from tests.kvtransfer.nodes import Pair, check_a_transfer_works

pytestmark = NEEDS_NIXL
SECRET = ClusterSecret(b"the cluster secret of these tests")


@pytest.fixture
def by_nixl() -> Iterator[Callable[..., NixlChannel]]:
    """Make channels that are closed at the end."""
    made: list[NixlChannel] = []

    def make(secret: ClusterSecret | None = SECRET) -> NixlChannel:
        made.append(NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock(), secret))
        return made[-1]

    yield make
    for channel in made:
        channel.close()
        gauges = channel.gauges()
        assert {name: value for name, value in gauges.items() if value and not name.endswith("_total")} == {}


def test_what_was_lent_arrives_and_its_slot_comes_back(by_nixl: Callable[..., NixlChannel]) -> None:
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    assert listener.gauges()["kv_nixl_links"] == dialler.gauges()["kv_nixl_links"] == 1
    num_bytes = send_lent(listener, dialler, route, 3 * NUM_SLOTS)
    assert listener.gauges()["kv_nixl_bytes_total"] == dialler.gauges()["kv_nixl_bytes_total"] == num_bytes
    assert dialler.gauges()["kv_nixl_overflows_total"] == listener.gauges()["kv_nixl_reads"] == 0


def test_no_slot_is_used_again_before_it_was_read_and_order_is_kept(by_nixl: Callable[..., NixlChannel]) -> None:
    """What has no slot goes over TCP, and waits there for the reads before it."""
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    for number in range(NUM_SLOTS):
        assert dialler.send_data(route, b"h", memoryview(bytes([number]) * MAX_FRAME_BYTES), lambda: None)
    assert dialler.lend(route, 1) is None
    assert dialler.send_data(route, b"by TCP", memoryview(b"x" * 50), lambda: None)
    assert dialler.send(route, b"control")
    assert dialler.gauges()["kv_nixl_overflows_total"] == 1
    told = polled(listener, dialler, until=has(Arrived, NUM_SLOTS + 2))
    slots = [[b"h", bytes([number]) * MAX_FRAME_BYTES] for number in range(NUM_SLOTS)]
    assert frames_of(told) == [*slots, [b"by TCP", b"x" * 50], [b"control"]]


def test_what_was_read_stays_as_it_was_when_the_slot_is_used_again(by_nixl: Callable[..., NixlChannel]) -> None:
    """The checksum is taken over a copy: who writes into the memory afterwards changes nothing that was taken."""
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    told: list[ChannelEvent] = []
    for letter in (b"a", b"b"):
        assert dialler.send_data(route, b"h", memoryview(letter * 100), lambda: None)
        told += polled(listener, dialler, until=has(Arrived))
    assert frames_of(told) == [[b"h", b"a" * 100], [b"h", b"b" * 100]]


def test_a_lost_route_gives_back_what_was_lent(by_nixl: Callable[..., NixlChannel]) -> None:
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    released: list[str] = []
    lent = dialler.lend(route, 10)
    assert lent is not None
    lent[:] = b"x" * 10
    assert dialler.send_data(route, b"h", lent, lambda: released.append("once"))
    memory = dialler._offered[route].memory
    listener.close()
    polled(dialler, until=has(Lost))
    assert released == ["once"]
    assert memory.registration is None
    assert bytes(memory.view(0, ARENA_BYTES)) == bytes(ARENA_BYTES), "who reads it late must find nothing"
    assert dialler.lend(route, 10) is None
    assert dialler.gauges()["kv_nixl_links"] == 0


def test_an_end_without_nixl_is_reached_over_tcp() -> None:
    clock = ManualClock()
    with closing(ZeroMqChannel()) as listener, closing(NixlChannel(ZeroMqChannel(), NixlAgent(), clock)) as dialler:
        route = dialler.connect(listener.listen("127.0.0.1", 0))
        told = polled(listener, dialler, until=has(Arrived))
        assert frames_of(told) == [[ASK]]
        assert dialler.poll(0.0) == []
        clock.advance(nixl_channel.PROOF_WAIT_S)
        assert has(Connected)(dialler.poll(0.0))
        assert dialler.gauges()["kv_nixl_fallbacks_total"] == 1
        assert dialler.send_data(route, b"h", memoryview(b"payload"), lambda: None)
        assert frames_of(polled(listener, dialler, until=has(Arrived))) == [[b"h", b"payload"]]


def test_an_answer_that_comes_after_the_wait_for_it_costs_no_connection() -> None:
    """It was told to the protocol above, for which it is a damaged frame."""
    clock = ManualClock()
    with closing(ZeroMqChannel()) as listener, closing(NixlChannel(ZeroMqChannel(), NixlAgent(), clock)) as dialler:
        route = dialler.connect(listener.listen("127.0.0.1", 0))
        (asked,) = [event for event in polled(listener, dialler, until=has(Arrived)) if isinstance(event, Arrived)]
        clock.advance(nixl_channel.PROOF_WAIT_S)
        polled(dialler, until=has(Connected))
        late = (CHALLENGE + bytes(nixl_channel.NONCE_BYTES), SEEN + bytes(nixl_channel.NONCE_BYTES), UNSEEN + b"why")
        assert all(listener.send(asked.route, frame) for frame in (*late, b"hello"))
        assert frames_of(polled(dialler, until=has(Arrived))) == [[b"hello"]]
        dialler.disconnect(route)
        assert not dialler._without


def test_nixl_that_fails_at_serving_ends_its_routes_by_name(
    by_nixl: Callable[..., NixlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came out of `poll`, and would have ended the I/O loop."""
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    released: list[int] = []
    lent = dialler.lend(route, 10)
    assert lent is not None
    assert dialler.send_data(route, b"h", lent, lambda: released.append(1))
    monkeypatch.setattr(dialler._agent, "progress", _fails)
    (lost,) = dialler.poll(0.0)
    assert isinstance(lost, Lost)
    assert "planted" in lost.reason
    assert released == [1]
    assert dialler.gauges()["kv_nixl_links"] == 0


def test_another_secret_goes_without_and_nothing_of_it_is_parsed(
    by_nixl: Callable[..., NixlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, dialler = by_nixl(), by_nixl(ClusterSecret(b"another secret"))
    monkeypatch.setattr(listener._agent, "add_peer", lambda _: pytest.fail("a stranger's description is parsed"))
    route = meet(listener, dialler)
    assert dialler.lend(route, 10) is None
    for end in (listener, dialler):
        assert (end.gauges()["kv_nixl_fallbacks_total"], end.gauges()["kv_nixl_links"]) == (1, 0)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [((b"old",), (b"old", b"new")), ((b"old", b"new"), (b"new", b"old")), ((b"new",), (b"new", b"old"))],
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_ends_that_are_one_step_of_a_change_apart_go_by_nixl(
    by_nixl: Callable[..., NixlChannel], theirs: tuple[bytes, ...], ours: tuple[bytes, ...], is_swapped: bool
) -> None:
    """The value was copied when the channel was made."""
    secrets = ClusterSecret(b"before"), ClusterSecret(b"before")
    listener, dialler = (by_nixl(secret) for secret in secrets)
    for secret, values in zip(secrets, (ours, theirs) if is_swapped else (theirs, ours), strict=True):
        secret.replace(*values)
    route = meet(listener, dialler)
    assert dialler.lend(route, 10) is not None
    assert dialler.gauges()["kv_nixl_fallbacks_total"] == 0


def test_memory_that_nobody_described_falls_back(by_nixl: Callable[..., NixlChannel]) -> None:
    """The proof is read from the memory itself: an address beside what NIXL was told of is refused, by name."""
    listener, dialler = by_nixl(), by_nixl()
    describe = dialler._agent.describe

    def elsewhere(memory: RegisteredMemory) -> bytes:
        described = describe(memory)
        memory.address += ARENA_BYTES
        return described

    dialler._agent.describe = elsewhere  # type: ignore[method-assign]  # what a faulty peer does
    route = meet(listener, dialler)
    assert dialler.lend(route, 10) is None
    assert listener.gauges()["kv_nixl_fallbacks_total"] == dialler.gauges()["kv_nixl_fallbacks_total"] == 1


def test_who_read_other_memory_is_not_believed(by_nixl: Callable[..., NixlChannel]) -> None:
    dialler = by_nixl()
    with closing(ZeroMqChannel()) as liar:
        route = dialler.connect(liar.listen("127.0.0.1", 0))
        (asked,) = [event for event in polled(liar, dialler, until=has(Arrived)) if isinstance(event, Arrived)]
        liar.send(asked.route, SEEN + bytes(nixl_channel.NONCE_BYTES))
        polled(dialler, until=has(Connected))
    assert dialler.lend(route, 10) is None
    assert dialler.gauges()["kv_nixl_fallbacks_total"] == 1


class Endless:
    """A read that is never over."""

    def is_over(self) -> bool:
        return False


def test_what_came_behind_a_proof_that_fails_is_told(
    by_nixl: Callable[..., NixlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dialling end may have given up waiting, and said HELLO, before the listening end gives up reading."""
    clock, dialler = ManualClock(), by_nixl()
    with closing(NixlChannel(ZeroMqChannel(), NixlAgent(), clock, SECRET)) as listener:
        monkeypatch.setattr(listener._agent, "read", lambda *_: Endless())
        route = dialler.connect(listener.listen("127.0.0.1", 0))
        polled(dialler, listener, until=lambda _: listener.gauges()["kv_nixl_reads"] == 1)
        assert dialler.send(route, b"HELLO")
        assert dialler.send(route, b"and more")
        for _ in range(20):
            assert listener.poll(0.001) == []
        clock.advance(nixl_reads.PROOF_READ_WAIT_S)
        told = polled(listener, until=has(Arrived, 2))
        assert frames_of(told) == [[b"HELLO"], [b"and more"]]
        polled(dialler, until=has(Connected))
        assert listener.gauges()["kv_nixl_fallbacks_total"] == dialler.gauges()["kv_nixl_fallbacks_total"] == 1


def test_routes_that_only_ask_are_bounded(by_nixl: Callable[..., NixlChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_channel, "MAX_ASKING", 2)
    listener = by_nixl()
    address = listener.listen("127.0.0.1", 0)
    with closing(ZeroMqChannel()) as stranger:
        routes = [stranger.connect(address) for _ in range(4)]
        polled(stranger, listener, until=has(Connected, 4))
        assert all(stranger.send(route, ASK) for route in routes)
        assert len(frames_of(polled(stranger, listener, until=has(Arrived, 4)))) == 4
        assert len(listener._asking) == 2
        stranger.close()
        polled(listener, until=has(Lost, 4))
    assert not listener._asking


def test_a_strangers_frames_are_left_to_the_protocol_above(by_nixl: Callable[..., NixlChannel]) -> None:
    listener = by_nixl()
    address = listener.listen("127.0.0.1", 0)
    place = struct.pack("<III", 0, HEAD_BYTES, 10)
    strange = [DATA + place + b"h", FREE + bytes(4), SEEN + bytes(32), OFFER + bytes(100), ASK + b"x", b"PDNX", UNSEEN]
    with closing(ZeroMqChannel()) as stranger:
        route = stranger.connect(address)
        polled(stranger, listener, until=has(Connected))
        for frame in strange:
            stranger.send(route, frame)
        told = polled(listener, until=has(Arrived, len(strange)))
    assert frames_of(told) == [[frame] for frame in strange]


def test_a_descriptor_outside_the_memory_is_left_to_the_protocol_above(by_nixl: Callable[..., NixlChannel]) -> None:
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    for start, num_bytes in ((ARENA_BYTES, 1), (0, MAX_FRAME_BYTES + 1), (0, 0), (2**32 - 1, 2**32 - 1)):
        frame = DATA + struct.pack("<III", 0, start, num_bytes) + b"h"
        dialler.send(route, frame)
        assert frames_of(polled(listener, dialler, until=has(Arrived))) == [[frame]]


def test_a_read_that_fails_ends_the_route_at_both_ends(
    by_nixl: Callable[..., NixlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, and at once; what was sent after it is not told, and the next connection starts anew."""
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    monkeypatch.setattr(listener._agent, "read", _fails)
    assert dialler.send_data(route, b"h", memoryview(b"payload"), lambda: None)
    assert dialler.send(route, b"after it")
    (lost,) = polled(listener, until=has(Lost))
    assert isinstance(lost, Lost)
    assert "planted" in lost.reason
    assert dialler.send(route, b"before it learns of that")
    told = told_until_arrived(listener, b"before it learns of that", monkeypatch)
    assert told == [], "a lost route tells nothing any more"
    polled(dialler, listener, until=has(Lost))
    assert not listener.send(lost.route, b"too late")
    assert listener.gauges()["kv_nixl_links"] == dialler.gauges()["kv_nixl_links"] == 0
    assert listener.poll(0.0) == []


def told_until_arrived(channel: NixlChannel, frame: bytes, monkeypatch: pytest.MonkeyPatch) -> list[ChannelEvent]:
    """Poll until a frame came to the channel inside; return what this channel told till then."""
    inner_poll, came = channel._inner.poll, list[list[bytes]]()

    def poll(timeout_s: float | None) -> list[ChannelEvent]:
        events = inner_poll(timeout_s)
        came.extend(frames_of(events))
        return events

    with monkeypatch.context() as patched:
        patched.setattr(channel._inner, "poll", poll)
        told = polled(channel, until=lambda _: [frame] in came)
        return told + channel.poll(0.0)


def _fails(*_: object) -> None:
    raise NixlFault("planted")


def test_services_by_nixl() -> None:
    """The whole protocol, with packing straight into the memory."""
    pair = Pair.make(lambda: NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock())).start()
    try:
        check_a_transfer_works(pair)
        sent = pair.sender.gauges()
        assert sent["kv_nixl_links"] == 1
        assert sent["kv_nixl_bytes_total"] == pair.receiver.gauges()["kv_nixl_bytes_total"] > 0
        assert sent["kv_nixl_overflows_total"] == 0
    finally:
        pair.stop()
