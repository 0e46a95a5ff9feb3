"""The two processes of `make bench-transfer`: this one sends, a child receives. Pools are plain memory.

Both transports move transfers one after another, or with several in flight, as a node under load does. Packing copies out of a
pool and placing copies into one. The bare transport does neither, as raw TCP does not; shared memory packs even then, since that
is the first of its two copies.

The child answers commands over a pipe, so that its CPU time can be read apart from this process's own.
"""

import multiprocessing
import os
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TypeVar

from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.layout import KvLayout
from pdserve.kvtransfer import (
    Acked,
    Granted,
    KvReceiveService,
    KvSendService,
    Opened,
    PeerUp,
    ReceiveEvent,
    SendEvent,
    SendFailed,
    TransferSpec,
)
from pdserve.kvtransfer.channel import Channel
from tests.kvtransfer.nodes import FIRST, settings, spec_for

POOL_BYTES = 64 << 20
"""Larger than the caches, so that copies cost what they cost in a node."""
PIECE_BYTES = 1 << 20
WAIT_S = 120.0
MakeChannel = Callable[[], Channel]
E = TypeVar("E", PeerUp, Granted, Acked)


def cpu_s() -> float:
    """Return CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class Copies:
    """Which of the pools' copies are made."""

    packs: bool = True
    places: bool = True


class RollingMemory:
    """Memory that is read or written piece after piece, from the start again at its end."""

    def __init__(self, copies: Copies = Copies()) -> None:
        self._copies = copies
        self._view = memoryview(bytearray(os.urandom(PIECE_BYTES) * (POOL_BYTES // PIECE_BYTES)))
        self._at = 0

    def piece(self, num_bytes: int) -> memoryview:
        """Return the next `num_bytes`."""
        if self._at + num_bytes > POOL_BYTES:
            self._at = 0
        piece = self._view[self._at : self._at + num_bytes]
        self._at += num_bytes
        return piece

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        """Copy out of it."""
        if self._copies.packs:
            into[:] = self.piece(len(into))

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        """Copy into it."""
        if self._copies.places:
            self.piece(len(payload))[:] = payload


@dataclass(frozen=True, slots=True)
class Taken:
    """What a round of transfers took: wall seconds, and CPU seconds of both processes."""

    num_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        """Rate of the round."""
        return self.num_bytes / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU seconds of both ends for 10⁹ bytes."""
        return self.cpu_s / self.num_bytes * 1e9


# --- raw TCP ---------------------------------------------------------------------------------------------------------------


def _tcp_child(pipe: Connection, size: int) -> None:
    memory = RollingMemory()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (num := pipe.recv()) != "end":
                pipe.send(cpu_s())
                for _ in range(num):
                    _receive_one(connection, memory, size)
                    connection.sendall(b"a")
                pipe.send(cpu_s())


def _receive_one(connection: socket.socket, memory: RollingMemory, size: int) -> None:
    for at in range(0, size, PIECE_BYTES):
        piece = memory.piece(min(PIECE_BYTES, size - at))
        while piece:
            num = connection.recv_into(piece)
            assert num, "the connection ended"
            piece = piece[num:]


class RawTcp:
    """One connection over loopback: `size` bytes a transfer, in pieces of 1 MiB; each transfer is answered with one byte."""

    def __init__(self, pipe: Connection, size: int) -> None:
        self._pipe, self._size, self._memory = pipe, size, RollingMemory()
        self._connection = socket.create_connection(("127.0.0.1", pipe.recv()))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round(self, num_transfers: int, in_flight: int) -> Taken:
        """Move transfers, of which `in_flight` may wait for their answers."""
        self._pipe.send(num_transfers)
        child_cpu_s, own_cpu_s, begun_s = self._pipe.recv(), cpu_s(), time.perf_counter()
        num_waiting = 0
        for _ in range(num_transfers):
            self._send_one()
            num_waiting += 1
            if num_waiting == in_flight:
                num_waiting -= len(self._connection.recv(in_flight))
        while num_waiting:
            num_waiting -= len(self._connection.recv(in_flight))
        wall_s, own_cpu_s = time.perf_counter() - begun_s, cpu_s() - own_cpu_s
        return Taken(self._size * num_transfers, wall_s, own_cpu_s + self._pipe.recv() - child_cpu_s)

    def alone(self, num_transfers: int) -> list[float]:
        """Move transfers one after another; return the seconds of each."""
        self._pipe.send(num_transfers)
        self._pipe.recv()
        walls = []
        for _ in range(num_transfers):
            begun_s = time.perf_counter()
            self._send_one()
            assert self._connection.recv(1), "the connection ended"
            walls.append(time.perf_counter() - begun_s)
        self._pipe.recv()
        return walls

    def close(self) -> None:
        """End both."""
        self._pipe.send("end")
        self._connection.close()

    def _send_one(self) -> None:
        for at in range(0, self._size, PIECE_BYTES):
            self._connection.sendall(self._memory.piece(min(PIECE_BYTES, self._size - at)))


@contextmanager
def raw_tcp(size: int) -> Iterator[RawTcp]:
    """Run both ends of a plain connection."""
    with child(_tcp_child, size) as pipe:
        both = RawTcp(pipe, size)
        try:
            yield both
        finally:
            both.close()


def memcpy_bytes_per_s() -> float:
    """Return the rate at which one core copies between two buffers larger than its caches, median of pieces of 16 MiB."""
    source, target, walls = RollingMemory(), RollingMemory(), []
    for _ in range(20):
        begun_s = time.perf_counter()
        for _ in range(16):
            target.piece(PIECE_BYTES)[:] = source.piece(PIECE_BYTES)
        walls.append(time.perf_counter() - begun_s)
    return 16 * PIECE_BYTES / sorted(walls)[len(walls) // 2]


# --- the corridor ----------------------------------------------------------------------------------------------------------


def _decode_child(pipe: Connection, layout: KvLayout, make_channel: MakeChannel, copies: Copies) -> None:
    """Receive until told to end: what is in a list of specs is expected, and granted as soon as it is opened."""
    up = threading.Event()

    def on_event(event: ReceiveEvent) -> None:
        match event:
            case PeerUp():
                up.set()
            case Opened(transfer_id):
                service.grant(transfer_id)

    mine = settings(layout)
    service = KvReceiveService(mine, RollingMemory(copies), on_event, make_channel=make_channel)
    service.start()
    pipe.send((mine.incarnation, service.endpoint))
    service.set_peers(frozenset({pipe.recv()}))
    while (asked := pipe.recv()) != "end":
        for spec in asked:
            service.expect(spec)
        pipe.send(cpu_s())
    service.stop()


class Corridor:
    """A sending service and a child that receives."""

    def __init__(self, pipe: Connection, layout: KvLayout, make_channel: MakeChannel, copies: Copies) -> None:
        self._pipe = pipe
        self._layout = layout
        self._changed = threading.Condition()
        self._events: list[SendEvent] = []
        mine = settings(layout)
        self._mine: Incarnation = mine.incarnation
        self.service = KvSendService(mine, RollingMemory(copies), self._on_event, make_channel=make_channel)
        self.service.start()
        self._peer, endpoint = pipe.recv()
        pipe.send(self._mine)
        self.service.set_peers({self._peer: endpoint})
        self._wait(PeerUp)

    def expected(self, num_tokens: int, num_transfers: int) -> list[TransferSpec]:
        """Return transfers that the receiving node was told of, as a router would have."""
        specs = [spec_for(self._peer, num_tokens) for _ in range(num_transfers)]
        self._child_cpu_s([replace(spec, peer=self._mine) for spec in specs])
        return specs

    def granted(self, spec: TransferSpec) -> None:
        """Open a transfer and wait for its grant."""
        self.service.open(spec)
        self._wait(Granted)

    def finish(self, spec: TransferSpec) -> Acked:
        """Commit, and wait for ACK."""
        self.service.commit(spec.transfer_id, FIRST, {})
        return self._wait(Acked)

    def alone(self, num_tokens: int, num_transfers: int) -> list[float]:
        """Move transfers one after another, each ready as a whole; return the seconds of each from then to ACK."""
        walls = []
        for spec in self.expected(num_tokens, num_transfers):
            self.granted(spec)
            begun_s = time.perf_counter()
            self._ready(spec)
            self.finish(spec)
            walls.append(time.perf_counter() - begun_s)
        return walls

    def round(self, num_tokens: int, num_transfers: int, in_flight: int) -> Taken:
        """Move transfers, each ready as a whole, from OPEN to ACK, `in_flight` at once."""
        waiting = deque(self.expected(num_tokens, num_transfers))
        specs = {spec.transfer_id: spec for spec in waiting}
        child_cpu_s, own_cpu_s, begun_s = self._child_cpu_s([]), cpu_s(), time.perf_counter()
        for _ in range(min(in_flight, num_transfers)):
            self.service.open(waiting.popleft())
        num_left = num_transfers
        while num_left:
            for event in self._next_events():
                if isinstance(event, Granted):
                    spec = specs[event.transfer_id]
                    self._ready(spec)
                    self.service.commit(spec.transfer_id, FIRST, {})
                elif isinstance(event, Acked):
                    num_left -= 1
                    if waiting:
                        self.service.open(waiting.popleft())
                assert not isinstance(event, SendFailed), event
        wall_s, own_cpu_s = time.perf_counter() - begun_s, cpu_s() - own_cpu_s
        num_bytes = num_transfers * self._layout.range_bytes(range(self._layout.num_layers), num_tokens)
        return Taken(num_bytes, wall_s, own_cpu_s + self._child_cpu_s([]) - child_cpu_s)

    def overlapped(self, num_tokens: int, compute_s: float, chunk: int = 512) -> float:
        """Move one transfer whose layers become ready over `compute_s`, chunk after chunk; return its exposed seconds.

        Computing is waiting here, as it is for the host of an accelerator.
        """
        (spec,) = self.expected(num_tokens, 1)
        self.granted(spec)
        begun_s, num_layers, done = time.perf_counter(), self._layout.num_layers, 0
        for start in range(0, num_tokens, chunk):
            tokens = range(start, min(start + chunk, num_tokens))
            for layer in range(num_layers):
                done += len(tokens)
                ready_s = begun_s + compute_s * done / (num_tokens * num_layers)
                time.sleep(max(0.0, ready_s - time.perf_counter()))
                self.service.mark_ready(spec.transfer_id, range(layer, layer + 1), tokens)
        return self.finish(spec).stats.exposed_s

    def close(self) -> None:
        """End both."""
        self.service.stop()
        self._pipe.send("end")

    def _ready(self, spec: TransferSpec) -> None:
        self.service.mark_ready(spec.transfer_id, range(self._layout.num_layers), range(spec.num_tokens))

    def _child_cpu_s(self, specs: list[TransferSpec]) -> float:
        """Have the receiving process expect `specs`; return its CPU seconds."""
        self._pipe.send(specs)
        return float(self._pipe.recv())

    def _on_event(self, event: SendEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _next_events(self) -> list[SendEvent]:
        """Wait for events and return them."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._events, WAIT_S), f"no event within {WAIT_S} s"
            events, self._events = self._events, []
        return events

    def _wait(self, kind: type[E]) -> E:
        def found() -> list[SendEvent]:
            return [event for event in self._events if isinstance(event, (kind, SendFailed))]

        with self._changed:
            assert self._changed.wait_for(found, WAIT_S), f"no {kind.__name__} within {WAIT_S} s"
            event = found()[0]
            self._events.clear()
        assert isinstance(event, kind), event
        return event


@contextmanager
def corridor(layout: KvLayout, make_channel: MakeChannel, copies: Copies = Copies()) -> Iterator[Corridor]:
    """Run both ends over channels of one kind."""
    with child(_decode_child, layout, make_channel, copies) as pipe:
        both = Corridor(pipe, layout, make_channel, copies)
        try:
            yield both
        finally:
            both.close()


@contextmanager
def child(main: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `main(pipe, …)` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, *arguments))
    process.start()
    try:
        yield mine
    finally:
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
