"""Shared memory between processes of one host: the proof, what happens without it, and that nothing is left behind."""

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pdserve.core.clock import ManualClock, SystemClock
from pdserve.kvtransfer import shared_channel, shared_memory
from pdserve.kvtransfer.channel import Arrived, Connected, Lost
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.shared_channel import CLAIM, DATA, FREE, NUM_SLOTS, SEEN, SharedMemoryChannel
from pdserve.kvtransfer.shared_memory import ArenaDoor, MappedArena, OwnedArena, SharingRefused, door_name
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.channel_ends import WAIT_S, has, meet, polled, send_lent
from tests.kvtransfer.nodes import Pair, check_a_transfer_works, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract sockets are Linux's")


def memory_held() -> int:
    """Memfds that this process holds, as descriptors or mapped."""
    links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("memfd:pdserve-kv" in each for each in links) + Path("/proc/self/maps").read_text().count(
        "memfd:pdserve-kv"
    )


def is_door_open(port: int) -> bool:
    """Whether any process listens for shared memory of this port."""
    name = door_name(port)[1:].decode()
    return f"@{name}" in Path("/proc/net/unix").read_text()


@pytest.fixture
def shared() -> Iterator[Callable[[], SharedMemoryChannel]]:
    """Make channels that are closed at the end; afterwards no memory of theirs is left."""
    made: list[SharedMemoryChannel] = []
    before = memory_held()

    def make() -> SharedMemoryChannel:
        made.append(SharedMemoryChannel(ZeroMqChannel(), SystemClock()))
        return made[-1]

    yield make
    for channel in made:
        channel.close()
    assert memory_held() == before, "shared memory is left"


def test_what_was_lent_arrives_and_its_slot_comes_back(shared: Callable[[], SharedMemoryChannel]) -> None:
    listener, dialler = shared(), shared()
    route = meet(listener, dialler)
    assert listener.gauges()["kv_shared_links"] == dialler.gauges()["kv_shared_links"] == 1
    send_lent(listener, dialler, route, 3 * NUM_SLOTS)
    assert dialler.gauges()["kv_shared_overflows_total"] == 0


def test_a_slot_is_not_used_again_before_the_other_end_gave_it_back(shared: Callable[[], SharedMemoryChannel]) -> None:
    listener, dialler = shared(), shared()
    route = meet(listener, dialler)
    for number in range(NUM_SLOTS):
        lent = dialler.lend(route, MAX_FRAME_BYTES)
        assert lent is not None
        lent[:] = bytes([number]) * MAX_FRAME_BYTES
        assert dialler.send_data(route, b"h", lent, lambda: None)
    assert dialler.lend(route, 1) is None
    assert dialler.send_data(route, b"by TCP", memoryview(b"x" * 50), lambda: None)
    assert dialler.gauges()["kv_shared_overflows_total"] == 1
    told = polled(listener, until=lambda told: len(told) == NUM_SLOTS + 2 - 1)
    arrived = [bytes(event.frames[1]) for event in told if isinstance(event, Arrived)]
    assert arrived == [bytes([n]) * MAX_FRAME_BYTES for n in range(NUM_SLOTS)] + [b"x" * 50]


def test_what_was_taken_stays_as_it_was_when_the_slot_is_used_again(shared: Callable[[], SharedMemoryChannel]) -> None:
    """The checksum is taken over a copy: who writes into the memory afterwards changes nothing that was taken."""
    listener, dialler = shared(), shared()
    route = meet(listener, dialler)
    lent = dialler.lend(route, 100)
    assert lent is not None
    lent[:] = b"a" * 100
    dialler.send_data(route, b"h", lent, lambda: None)
    told = polled(listener, until=has(Arrived))
    lent[:] = b"b" * 100
    assert [bytes(event.frames[1]) for event in told if isinstance(event, Arrived)] == [b"a" * 100]


def test_a_lost_route_gives_back_what_was_lent(shared: Callable[[], SharedMemoryChannel]) -> None:
    listener, dialler = shared(), shared()
    route = meet(listener, dialler)
    released: list[str] = []
    lent = dialler.lend(route, 10)
    assert lent is not None
    assert dialler.send_data(route, b"h", lent, lambda: released.append("once"))
    del lent
    listener.close()
    polled(dialler, until=has(Lost))
    assert released == ["once"]
    assert dialler.lend(route, 10) is None
    assert dialler.gauges()["kv_shared_links"] == 0


def test_an_end_without_shared_memory_is_reached_over_tcp(shared: Callable[[], SharedMemoryChannel]) -> None:
    dialler = shared()
    with closing(ZeroMqChannel()) as listener:
        route = meet(listener, dialler)
        assert dialler.gauges()["kv_shared_fallbacks_total"] == 1
        assert dialler.lend(route, 10) is None
        assert dialler.send_data(route, b"h", memoryview(b"payload"), lambda: None)
        told = polled(listener, dialler, until=has(Arrived))
        assert [bytes(frame) for event in told if isinstance(event, Arrived) for frame in event.frames] == [
            b"h",
            b"payload",
        ]


def test_another_process_took_the_memory(shared: Callable[[], SharedMemoryChannel]) -> None:
    """The listener of this port on another host looks the same from here; only the proof tells them apart."""
    dialler = shared()
    with closing(ZeroMqChannel()) as elsewhere:
        address = elsewhere.listen("127.0.0.1", 0)
        with closing(ArenaDoor(int(address.rpartition(":")[2]))) as neighbour:
            route = dialler.connect(address)
            told = polled(elsewhere, dialler, until=has(Arrived))
            (claim,) = [event for event in told if isinstance(event, Arrived)]
            assert bytes(claim.frames[0][: len(CLAIM)]) == CLAIM
            elsewhere.send(claim.route, SEEN + bytes(32))
            polled(dialler, until=has(Connected))
            neighbour.look()
            assert dialler.lend(route, 10) is None
            assert dialler.gauges()["kv_shared_fallbacks_total"] == 1
            neighbour.look()
            neighbour.look()
            assert neighbour.num_visitors == 0, "memory that nobody claims is kept"


def test_no_answer_to_a_claim() -> None:
    clock = ManualClock()
    with closing(ZeroMqChannel()) as silent, closing(SharedMemoryChannel(ZeroMqChannel(), clock)) as dialler:
        address = silent.listen("127.0.0.1", 0)
        with closing(ArenaDoor(int(address.rpartition(":")[2]))):
            dialler.connect(address)
            polled(silent, dialler, until=has(Arrived))
            assert dialler.poll(0.0) == []
            clock.advance(shared_channel.PROOF_WAIT_S)
            assert has(Connected)(dialler.poll(0.0))
            assert dialler.gauges()["kv_shared_fallbacks_total"] == 1


def test_a_stranger_s_frames_are_left_to_the_protocol_above(shared: Callable[[], SharedMemoryChannel]) -> None:
    listener = shared()
    address = listener.listen("127.0.0.1", 0)
    strange = [
        DATA + struct.pack("<III", 0, 0, 10) + b"h",
        FREE + bytes(4),
        SEEN + bytes(32),
        CLAIM + b"short",
        b"PDSM",
        DATA,
    ]
    with closing(ZeroMqChannel()) as stranger:
        route = stranger.connect(address)
        polled(stranger, listener, until=has(Connected))
        for frame in strange:
            stranger.send(route, frame)
        told = polled(listener, until=lambda told: len(told) == len(strange))
    assert [bytes(event.frames[0]) for event in told if isinstance(event, Arrived)] == strange


def test_a_descriptor_outside_the_memory_is_left_to_the_protocol_above(
    shared: Callable[[], SharedMemoryChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, dialler = shared(), shared()
    route = meet(listener, dialler)
    for start, num_bytes in ((NUM_SLOTS * MAX_FRAME_BYTES, 1), (0, MAX_FRAME_BYTES + 1), (2**32 - 1, 2**32 - 1)):
        dialler.send(route, DATA + struct.pack("<III", 0, start, num_bytes) + b"h")
        told = polled(listener, until=has(Arrived))
        assert [len(event.frames) for event in told if isinstance(event, Arrived)] == [1]


def test_memory_of_another_user_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ArenaDoor(40_000)) as door, closing(OwnedArena(1, 4096)) as arena:
        monkeypatch.setattr(shared_memory, "user_of", lambda _: os.geteuid() + 1)
        with pytest.raises(SharingRefused, match="runs as user"):
            arena.pass_to(40_000)
        door.look()
        assert (door.num_refused, door.num_visitors) == (1, 0)


def test_memory_that_could_shrink_is_not_mapped() -> None:
    """Reading a mapping whose file was cut kills the process."""
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 1 << 16)
    with pytest.raises(SharingRefused, match="sealed"):
        MappedArena(fd)


def test_a_mapping_is_read_only_and_its_memory_cannot_shrink() -> None:
    with closing(ArenaDoor(40_001)) as door, closing(OwnedArena(1, 4096)) as arena:
        arena.pass_to(40_001)
        with pytest.raises(PermissionError):
            os.ftruncate(arena._fd, 0)
        mapped = door.take(arena.token)
        assert mapped.nonce == arena.nonce
        with pytest.raises(TypeError):
            mapped._memory[0] = 1
        mapped.close()


def test_a_door_is_not_flooded() -> None:
    with closing(ArenaDoor(40_002)) as door:
        visits = []
        for _ in range(shared_memory.MAX_VISITORS + 8):
            visits.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            visits[-1].connect(door_name(40_002))
            door.look()
        assert (door.num_visitors, door.num_refused) == (shared_memory.MAX_VISITORS, 8)
        with closing(OwnedArena(1, 4096)) as arena:
            arena.pass_to(40_002)
            door.take(arena.token).close()
        for visit in visits:
            visit.close()
        door.look()
        door.look()
        assert door.num_visitors == 0


def test_services_over_shared_memory() -> None:
    """The whole protocol, with packing straight into the memory."""
    before = memory_held()
    pair = Pair.make(lambda: SharedMemoryChannel(ZeroMqChannel(), SystemClock())).start()
    try:
        check_a_transfer_works(pair)
        sent = pair.sender.gauges()
        assert sent["kv_shared_links"] == 1
        assert sent["kv_shared_bytes_total"] == pair.receiver.gauges()["kv_shared_bytes_total"] > 0
        assert sent["kv_shared_overflows_total"] == 0
    finally:
        pair.stop()
    assert memory_held() == before


LISTENER = """
import sys
from pdserve.core.clock import SystemClock
from pdserve.kvtransfer.shared_channel import SharedMemoryChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel
channel = SharedMemoryChannel(ZeroMqChannel(), SystemClock())
print(channel.listen("127.0.0.1", 0), flush=True)
while True:
    channel.poll(None)
"""


def test_kill_9_of_the_listening_process_leaves_nothing(shared: Callable[[], SharedMemoryChannel]) -> None:
    """Neither a socket's name nor memory: both ends' go with the process and with the route."""
    before = memory_held()
    dialler = shared()
    process = subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        port = int(address.rpartition(":")[2])
        route = dialler.connect(address)
        polled(dialler, until=has(Connected))
        assert dialler.gauges()["kv_shared_links"] == 1
        assert is_door_open(port)
        released: list[int] = []
        lent = dialler.lend(route, 100)
        assert lent is not None
        process.kill()
        process.wait(WAIT_S)
        dialler.send_data(route, b"h", lent, lambda: released.append(1))
        del lent
        polled(dialler, until=has(Lost))
    wait_until(lambda: not is_door_open(port), "the socket's name is gone")
    assert memory_held() == before
    assert dialler.gauges()["kv_shared_links"] == 0
    dialler.poll(0.0)
    assert len(released) <= 1
