"""The listening end's half of the NIXL channel: reads from peers' memory, and the order of what arrives on a route.

A payload is read into a landing slot of ours and copied out of it, so that its checksum is taken over a copy that nobody else
can write to. What comes on the route meanwhile waits behind it. A read that is given up, as with its route, keeps its landing
slot and its peer until it is over in truth: NIXL cannot take a read back.
"""

import contextlib
from collections import deque
from dataclasses import dataclass, field

from pdserve.kvtransfer.channel import Arrived, ChannelEvent, Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.nixl_engine import NixlAgent, NixlFault, Read, RegisteredMemory

NUM_LANDINGS = 16
"""Reads under way at once, all routes together."""
READ_WAIT_S = 5.0
"""A read takes no longer, or its route is lost."""
PROOF_READ_WAIT_S = 2.0
MAX_BEHIND = 4096
"""Events of one route that wait behind its reads; more end the route."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was found at the start of a new peer's memory."""

    route: Route
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """The peer may use this slot again."""

    route: Route
    slot: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The route cannot be read from."""

    route: Route
    reason: str
    was_proof: bool


Outcome = ChannelEvent | Seen | Taken | Broken


@dataclass(slots=True, eq=False)
class _Peer:
    """Whose memory is behind a route, and where it starts there."""

    name: str
    address: int
    is_proven: bool = False


@dataclass(slots=True, eq=False)
class _Wanted:
    """A read, from when it is asked for until what it brought is handed on. `header` is None for the proof."""

    route: Route
    peer: _Peer
    slot: int
    start: int
    num_bytes: int
    header: bytes | None
    due_s: float
    landing: int = -1
    read: Read | None = None
    payload: bytes | None = None
    failure: str = ""


@dataclass(slots=True)
class NixlReads:
    """Reads of one process. `look` does the work; it never waits."""

    agent: NixlAgent
    num_bytes: int = 0
    """Payload that was read."""
    _peers: dict[Route, _Peer] = field(default_factory=dict)
    _queues: dict[Route, deque[ChannelEvent | _Wanted]] = field(default_factory=dict)
    """What has come and was not handed on; the first of each is a read. Routes without any have none."""
    _unstarted: deque[_Wanted] = field(default_factory=deque)
    _running: list[_Wanted] = field(default_factory=list)
    _memory: RegisteredMemory | None = None
    _free: list[int] = field(default_factory=lambda: list(range(NUM_LANDINGS)))

    @property
    def num_routes(self) -> int:
        """Routes whose memory was seen. May be asked for by any thread."""
        return sum(peer.is_proven for peer in list(self._peers.values()))

    @property
    def num_running(self) -> int:
        """Reads under way, those that were given up included."""
        return len(self._running)

    @property
    def is_busy(self) -> bool:
        """Whether `look` has anything to do."""
        return bool(self._running or self._unstarted)

    def admit(self, route: Route, metadata: bytes, address: int, nonce_bytes: int, now_s: float) -> None:
        """Learn of the memory behind a route and read its first bytes, as a proof; raise NixlFault if that cannot be."""
        if self._memory is None:
            self._memory = self.agent.register(NUM_LANDINGS * MAX_FRAME_BYTES)
        self._peers[route] = _Peer(self.agent.add_peer(metadata), address)
        self._want(route, -1, 0, nonce_bytes, None, now_s + PROOF_READ_WAIT_S)

    def may_read(self, route: Route) -> bool:
        """Whether the memory behind this route was seen."""
        return route in self._peers and self._peers[route].is_proven

    def want(self, route: Route, slot: int, start: int, num_bytes: int, header: bytes, now_s: float) -> None:
        """Read a payload; it arrives in its turn."""
        self._want(route, slot, start, num_bytes, header, now_s + READ_WAIT_S)

    def comes_behind(self, event: ChannelEvent) -> bool:
        """Keep an event behind the reads of its route; False if there are none, and it may be told at once."""
        queue = self._queues.get(event.route)
        if queue is None:
            return False
        queue.append(event)
        return True

    def look(self, now_s: float) -> list[Outcome]:
        """Look after all reads; return what came of them, in order on each route.

        After `Broken`, unless it was the proof, the route is to be forgotten.
        """
        for wanted in list(self._running):
            self._look_at(wanted)
        while self._unstarted and self._free:
            self._start(self._unstarted.popleft())
        told: list[Outcome] = []
        for route, queue in list(self._queues.items()):
            self._hand_on(route, queue, told, now_s)
        return told

    def forget(self, route: Route) -> None:
        """The route is gone, with all that waits on it; reads under way are left to end."""
        self._queues.pop(route, None)
        self._let_go(route)

    def close(self) -> None:
        """Forget everything. The agent is closed right after."""
        self._peers.clear()
        self._queues.clear()
        self._unstarted.clear()
        self._running.clear()

    def _want(self, route: Route, slot: int, start: int, num_bytes: int, header: bytes | None, due_s: float) -> None:
        wanted = _Wanted(route, self._peers[route], slot, start, num_bytes, header, due_s)
        self._queues.setdefault(route, deque()).append(wanted)
        self._unstarted.append(wanted)

    def _start(self, wanted: _Wanted) -> None:
        assert self._memory is not None
        landing = self._free.pop()
        address = wanted.peer.address + wanted.start
        try:
            wanted.read = self.agent.read(
                wanted.peer.name, address, wanted.num_bytes, self._memory, landing * MAX_FRAME_BYTES
            )
        except NixlFault as fault:
            wanted.failure = str(fault)
            self._free.append(landing)
        else:
            wanted.landing = landing
            self._running.append(wanted)
            self._look_at(wanted)

    def _look_at(self, wanted: _Wanted) -> None:
        assert wanted.read is not None
        assert self._memory is not None
        try:
            if not wanted.read.is_over():
                return
        except NixlFault as fault:
            wanted.failure = str(fault)
        else:
            if self._peers.get(wanted.route) is wanted.peer:
                wanted.payload = bytes(self._memory.view(wanted.landing * MAX_FRAME_BYTES, wanted.num_bytes))
        self._running.remove(wanted)
        self._free.append(wanted.landing)
        self._drop_unused(wanted.peer)

    def _hand_on(self, route: Route, queue: deque[ChannelEvent | _Wanted], told: list[Outcome], now_s: float) -> None:
        while queue:
            first = queue[0]
            if not isinstance(first, _Wanted):
                told.append(first)
            elif first.payload is None:
                reason = first.failure or self._overdue(first, len(queue), now_s)
                if not reason:
                    return
                told.append(Broken(route, reason, was_proof=first.header is None))
                if first.header is not None:
                    return
                # The route goes on without: what waited behind the proof is handed on.
                self._let_go(route)
            elif first.header is None:
                first.peer.is_proven = True
                told.append(Seen(route, first.payload))
            else:
                self.num_bytes += first.num_bytes
                told += [Taken(route, first.slot), Arrived(route, (first.header, first.payload))]
            queue.popleft()
        self._queues.pop(route, None)

    @staticmethod
    def _overdue(wanted: _Wanted, num_behind: int, now_s: float) -> str:
        if now_s >= wanted.due_s:
            return "a read is not over in time"
        return "too much waits behind a read" if num_behind > MAX_BEHIND else ""

    def _let_go(self, route: Route) -> None:
        peer = self._peers.pop(route, None)
        self._unstarted = deque(wanted for wanted in self._unstarted if wanted.route != route)
        if peer is not None:
            self._drop_unused(peer)

    def _drop_unused(self, peer: _Peer) -> None:
        """Forget a peer to which no route leads, and from which no read is under way."""
        names = [*(other.name for other in self._peers.values()), *(wanted.peer.name for wanted in self._running)]
        if peer.name not in names:
            # A peer that NIXL lost by itself is as good as forgotten.
            with contextlib.suppress(NixlFault):
                self.agent.drop_peer(peer.name)
