"""Payloads by NIXL: the proof, what happens without it, what a lost or stopped peer leaves. UCX runs on the CPU here."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pdserve.core.clock import ManualClock, SystemClock
from pdserve.kvtransfer import nixl_channel, nixl_reads
from pdserve.kvtransfer.channel import Arrived, Channel, ChannelEvent, Connected, Lost, Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.nixl_channel import (
    ARENA_BYTES,
    ASK,
    DATA,
    FREE,
    HEAD_BYTES,
    NUM_SLOTS,
    OFFER,
    SEEN,
    UNSEEN,
    NixlChannel,
)
from pdserve.kvtransfer.nixl_engine import INSTALL, NixlAgent, NixlFault, RegisteredMemory, installed_package
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import Pair, check_a_transfer_works

pytestmark = pytest.mark.skipif(installed_package() is None, reason=f"NIXL is not installed ({INSTALL})")
WAIT_S = 20.0
SECRET = b"the cluster secret of these tests"


@pytest.fixture
def by_nixl() -> Iterator[Callable[..., NixlChannel]]:
    """Make channels that are closed at the end."""
    made: list[NixlChannel] = []

    def make(secret: bytes | None = SECRET) -> NixlChannel:
        made.append(NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock(), secret))
        return made[-1]

    yield make
    for channel in made:
        channel.close()
        gauges = channel.gauges()
        assert {name: value for name, value in gauges.items() if value and not name.endswith("_total")} == {}


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


def meet(listener: Channel, dialler: Channel) -> Route:
    """Connect, and return the dialler's route."""
    route = dialler.connect(listener.listen("127.0.0.1", 0))
    polled(dialler, listener, until=has(Connected))
    return route


def frames_of(told: list[ChannelEvent]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in event.frames] for event in told if isinstance(event, Arrived)]


def test_what_was_lent_arrives_and_its_slot_comes_back(by_nixl: Callable[..., NixlChannel]) -> None:
    listener, dialler = by_nixl(), by_nixl()
    route = meet(listener, dialler)
    assert listener.gauges()["kv_nixl_links"] == dialler.gauges()["kv_nixl_links"] == 1
    released: list[int] = []
    for number in range(3 * NUM_SLOTS):
        lent = dialler.lend(route, 1000 + number)
        assert lent is not None
        lent[:] = bytes([number]) * len(lent)
        assert dialler.send_data(route, b"h%d" % number, lent, lambda n=number: released.append(n))  # type: ignore[misc]  # default binds
        assert number not in released, "released before the other end read it"
        told = polled(listener, dialler, until=has(Arrived))
        assert frames_of(told) == [[b"h%d" % number, bytes([number]) * (1000 + number)]]
        polled(dialler, listener, until=lambda _, n=number: n in released)  # type: ignore[misc]  # default binds
    assert released == list(range(3 * NUM_SLOTS))
    num_bytes = sum(1000 + number for number in released)
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


def test_another_secret_goes_without_and_nothing_of_it_is_parsed(
    by_nixl: Callable[..., NixlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, dialler = by_nixl(), by_nixl(b"another secret")
    monkeypatch.setattr(listener._agent, "add_peer", lambda _: pytest.fail("a stranger's description is parsed"))
    route = meet(listener, dialler)
    assert dialler.lend(route, 10) is None
    for end in (listener, dialler):
        assert (end.gauges()["kv_nixl_fallbacks_total"], end.gauges()["kv_nixl_links"]) == (1, 0)


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


# --- a peer in another process, over what UCX imitates, which needs both ends: what NIXL leaves to be done ------------------

DIALLER = """
import sys
from pdserve.core.clock import SystemClock
from pdserve.kvtransfer.channel import Connected
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.nixl_engine import NixlAgent
from pdserve.kvtransfer.zeromq import ZeroMqChannel
channel = NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock())
route = channel.connect(sys.argv[1])
while not any(isinstance(event, Connected) for event in channel.poll(1.0)):
    pass
assert channel.lend(route, 1) is not None, "no NIXL"
print("ready", flush=True)
for line in sys.stdin:
    if line == "send\\n":
        channel.send_data(route, b"h", memoryview(b"x" * (1 << 20)), lambda: None)
    else:
        channel._agent.progress()
    # What UCX still has to do here for the payload is left undone between two commands.
    print("done", flush=True)
"""


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use TCP alone: what an agent takes is settled when it is made."""
    monkeypatch.setenv("UCX_TLS", "tcp")


class Elsewhere:
    """A dialler in a process of its own, connected to `listener`."""

    def __init__(self, listener: NixlChannel, address: str) -> None:
        command = [sys.executable, "-c", DIALLER, address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        links = listener.gauges()["kv_nixl_links"]
        polled(listener, until=lambda _: listener.gauges()["kv_nixl_links"] > links)
        assert self._said() == "ready"

    def do(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert self._said() == "done"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.mark.usefixtures("over_tcp")
def test_kill_9_under_a_read_ends_the_route_and_frees_everything() -> None:
    with closing(NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock())) as listener:
        elsewhere = Elsewhere(listener, listener.listen("127.0.0.1", 0))
        try:
            elsewhere.do("send")
            polled(listener, until=lambda _: listener.gauges()["kv_nixl_reads"] > 0)
        finally:
            elsewhere.kill()
        told = polled(listener, until=has(Lost))
        assert not has(Arrived)(told)
        polled(listener, until=lambda _: listener.gauges()["kv_nixl_reads"] == 0)
        assert listener.gauges()["kv_nixl_links"] == 0
        assert len(listener._reads._free) == 16, "a landing slot is lost"


@pytest.mark.usefixtures("over_tcp")
def test_gap_a_read_cannot_be_taken_back() -> None:
    """NIXL's gap: a peer that stands still leaves its read under way, which then writes late. Its landing slot waits for that."""
    clock = ManualClock()
    with closing(NixlChannel(ZeroMqChannel(), NixlAgent(), clock)) as listener:
        elsewhere = Elsewhere(listener, listener.listen("127.0.0.1", 0))
        try:
            elsewhere.do("send")
            polled(listener, until=lambda _: listener.gauges()["kv_nixl_reads"] == 1)
            reads = listener._reads
            (wanted,) = reads._running
            clock.advance(nixl_channel.SPIN_S + 60.0)
            told = polled(listener, until=has(Lost))
            assert [type(event) for event in told] == [Lost], "a read that is overdue ends its route by name"
            for _ in range(5):
                assert listener.poll(0.0) == []
            assert listener.gauges()["kv_nixl_links"] == 0
            assert listener.gauges()["kv_nixl_reads"] == 1, "it is still under way"
            assert wanted.landing not in reads._free, "its memory must not be used again"
            assert reads._memory is not None
            landing = reads._memory.view(wanted.landing * MAX_FRAME_BYTES, MAX_FRAME_BYTES)
            assert landing[-1] == 0

            def is_over(_: list[ChannelEvent]) -> bool:
                elsewhere.do("progress")
                return listener.gauges()["kv_nixl_reads"] == 0

            assert polled(listener, until=is_over) == []
            assert landing[-1] == ord("x"), "it no longer writes late: then the landing slot may be free at once"
            assert wanted.landing in reads._free
        finally:
            elsewhere.kill()


@pytest.mark.usefixtures("over_tcp")
def test_gap_an_idle_channel_does_nothing_and_a_busy_one_must_look() -> None:
    """NIXL's gap: there is no descriptor to wait on. Idle ends wait in ZeroMQ; only what is under way is looked after."""
    clock = ManualClock()
    with closing(NixlChannel(ZeroMqChannel(), NixlAgent(), clock)) as listener:
        elsewhere = Elsewhere(listener, listener.listen("127.0.0.1", 0))
        try:
            assert listener._wait_s(None) is None, "an idle end must not wake up by itself"
            elsewhere.do("send")
            polled(listener, until=lambda _: listener.gauges()["kv_nixl_reads"] == 1)
            assert listener._wait_s(None) == 0.0, "what moved a moment ago is looked after all the time"
            clock.advance(nixl_channel.SPIN_S)
            waits = [listener._wait_s(None) for _ in range(8)]
            assert (waits[0], waits[-1]) == nixl_channel.LONG_NAPS_S
        finally:
            elsewhere.kill()


def test_gap_ucx_on_the_cpu_serves_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL's gap: without RDMA nobody checks what a peer reads, whatever was registered. UCX's ports are for trusted networks."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with closing(NixlAgent()) as owner, closing(NixlAgent()) as thief:
        offered, into = owner.register(4096), thief.register(4096)
        private = RegisteredMemory(4096)
        private.view(0, 6)[:] = b"secret"
        described = owner.describe(offered)
        told, forged = (memory.address.to_bytes(8, "little") for memory in (offered, private))
        assert described.count(told) == 1
        peer = thief.add_peer(described.replace(told, forged))
        read = thief.read(peer, private.address, 4096, into, 0)
        deadline_s = time.monotonic() + WAIT_S
        while not read.is_over():
            assert time.monotonic() < deadline_s
            owner.progress()
        assert bytes(into.view(0, 6)) == b"secret"


def test_a_local_agent_is_reached_from_this_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = listening()
    with closing(NixlAgent(is_local=True)):
        assert {address.split(":")[0] for address in listening() - before} == {"0100007F"}


def listening() -> set[str]:
    """TCP addresses that this process listens at, as the kernel writes them."""
    mine = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def test_an_agent_has_no_thread_that_spins() -> None:
    before = os.times()
    with closing(NixlAgent()):
        signal.sigtimedwait([], 0.2)
    after = os.times()
    assert after.user - before.user + after.system - before.system < 0.19


def test_garbage_for_a_description_is_a_named_fault() -> None:
    with closing(NixlAgent()) as agent:
        for garbage in (b"", b"garbage" * 10):
            with pytest.raises(NixlFault, match="Mismatch"):
                agent.add_peer(garbage)
