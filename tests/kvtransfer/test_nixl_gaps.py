"""What NIXL leaves to be done or to be known, each gap shown by a test. UCX runs on the CPU here."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from pdserve.core.clock import ManualClock, SystemClock
from pdserve.kvtransfer import nixl_channel, nixl_reads
from pdserve.kvtransfer.channel import Arrived, ChannelEvent, Connected, Lost
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.nixl_engine import NixlAgent, NixlFault, RegisteredMemory
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.channel_ends import WAIT_S, has, polled
from tests.kvtransfer.nixl_ends import NEEDS_NIXL

pytestmark = NEEDS_NIXL
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
        assert len(listener._reads._free) == nixl_reads.NUM_LANDINGS, "a landing slot is lost"


READER = """
from pdserve.core.clock import SystemClock
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.nixl_engine import NixlAgent
from pdserve.kvtransfer.zeromq import ZeroMqChannel
channel = NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock())
print(channel.listen("127.0.0.1", 0), flush=True)
while not channel.gauges()["kv_nixl_reads"] or not channel.gauges()["kv_nixl_links"]:
    channel.poll(0.01)
print("reads", flush=True)
input()
"""


@pytest.mark.usefixtures("over_tcp")
def test_kill_9_of_the_reading_end_gives_back_what_was_lent() -> None:
    released: list[int] = []
    command = [sys.executable, "-c", READER]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader,
        closing(NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock())) as dialler,
    ):
        assert reader.stdout is not None
        try:
            route = dialler.connect(reader.stdout.readline().strip())
            polled(dialler, until=has(Connected))
            lent = dialler.lend(route, MAX_FRAME_BYTES)
            assert lent is not None
            assert dialler.send_data(route, b"h", lent, lambda: released.append(1))
            assert reader.stdout.readline().strip() == "reads"
        finally:
            reader.kill()
        polled(dialler, until=has(Lost))
        assert released == [1]
        assert dialler.gauges()["kv_nixl_links"] == 0
        for _ in range(20):
            dialler._agent.progress()


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
