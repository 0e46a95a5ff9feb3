"""Shared memory for payloads between processes of one host, ZeroMQ for everything else: a decorator of the ZeroMQ channel.

When a dialled route stands, its end passes memory to the other through a Unix socket, and claims it on the route. The listening
end answers with the nonce that it found in the memory: this proves that the process at the other end of the route sees the same
memory. Only then is `Connected` told. Whatever keeps the two from it is named, counted and logged, and the route carries its
payloads over TCP. From then on the dialling end packs straight into a slot (`lend`) and sends a descriptor; the listening end
copies the payload out, so that its checksum is taken over the copy, and gives the slot back by a message. A slot is never
written to again before that, and the memory of a lost route is never used again.
"""

import logging
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.clock import Clock
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import MAX_BATCH, Arrived, Channel, ChannelEvent, Connected, Lost, Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.lent_slots import LentSlots, is_slot_list, slot_list
from pdserve.kvtransfer.settings import MAX_FRAMES_IN_SOCKET
from pdserve.kvtransfer.shared_memory import (
    NONCE_BYTES,
    TOKEN_BYTES,
    ArenaDoor,
    MappedArena,
    OwnedArena,
    SharingRefused,
)

_logger = logging.getLogger(__name__)

NUM_SLOTS = 2 * MAX_FRAMES_IN_SOCKET
PROOF_WAIT_S = 2.0
"""The other end answers a claim within this time, or the route goes without shared memory."""
CLAIM, SEEN, UNSEEN, DATA, FREE = (b"PDSM" + bytes([kind]) for kind in range(1, 6))
"""Frames between two such channels; none of them reaches the protocol above."""
_KIND_BYTES = len(CLAIM)
_PLACE = struct.Struct("<III")
"""Of DATA: slot, where it starts behind the head, payload bytes."""


class WatchingChannel(Channel, Protocol):
    """A channel whose `poll` can wait for more."""

    def watch(self, fd: int) -> None:
        """End `poll` when this descriptor is readable, too."""
        ...


@dataclass(slots=True)
class _Shared:
    """The memory of a route that was dialled here."""

    arena: OwnedArena
    slots: LentSlots
    due_s: float
    is_proven: bool = False


class SharedMemoryChannel:
    """One end. Implements `channel.Channel` and `channel.LendingChannel`."""

    def __init__(self, inner: WatchingChannel, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._door: ArenaDoor | None = None
        self._port_of: dict[Route, int] = {}
        self._owned: dict[Route, _Shared] = {}
        self._mapped: dict[Route, MappedArena] = {}
        self._events: deque[ChannelEvent] = deque()
        self._released: deque[Callable[[], None]] = deque()
        """Whom to tell that their payload is free; told from within `poll`, `send_data` or `close`."""
        self._num_fallbacks = 0
        self._num_overflows = 0
        self._shared_bytes = 0
        self._is_closed = False

    def listen(self, host: str, port: int) -> str:
        """Accept connections, and memory from this host."""
        address = self._inner.listen(host, port)
        try:
            self._door = ArenaDoor(_port(address))
        except OSError as error:
            self._falls_back(address, f"no Unix socket to take memory at ({error})")
        else:
            self._inner.watch(self._door.fileno())
        return address

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        """Dial once."""
        route = self._inner.connect(address, shown)
        self._port_of[route] = _port(address)
        return route

    def trust(self, route: Route) -> None:
        """Pass it on."""
        self._inner.trust(route)

    def disconnect(self, route: Route) -> None:
        """Drop a route, and its memory."""
        self._events = deque(event for event in self._events if event.route != route)
        self._forget(route)
        self._inner.disconnect(route)

    def lend(self, route: Route, num_bytes: int) -> memoryview | None:
        """Return a slot of the route's memory to pack into; None if it has no memory, or no slot is free."""
        shared = self._owned.get(route)
        return None if shared is None or not shared.is_proven else shared.slots.lend(num_bytes)

    def send(self, route: Route, header: bytes) -> bool:
        """Send one frame."""
        return self._inner.send(route, header)

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        """Send a descriptor of the payload: of where it lies, if it was packed into what `lend` gave, else of a copy."""
        self._tell_released()
        shared = self._owned.get(route)
        if shared is None or not shared.is_proven:
            return self._inner.send_data(route, header, payload, on_released)
        if not shared.slots.has_room(len(payload)):
            self._num_overflows += 1
            return self._inner.send_data(route, header, payload, on_released)

        def tell(slot: int) -> bool:
            place = _PLACE.pack(slot, slot * MAX_FRAME_BYTES, len(payload))
            return self._inner.send(route, DATA + place + header)

        if not shared.slots.send(payload, on_released, tell):
            return False
        self._shared_bytes += len(payload)
        return True

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        """Wait for events; what is between the two channels is dealt with here."""
        if self._is_closed:
            return []
        timeout_s = 0.0 if self._events else self._wait_s(timeout_s)
        while True:
            batch = self._inner.poll(timeout_s)
            free: dict[Route, list[int]] = {}
            for event in batch:
                self._see(event, free)
            for route, slots in free.items():
                self._inner.send(route, FREE + slot_list(slots))
            if len(batch) < MAX_BATCH or len(self._events) >= MAX_BATCH:
                break
            timeout_s = 0.0
        if self._door is not None:
            self._door.look()
        self._expire(self._clock.now_s())
        self._tell_released()
        return [self._events.popleft() for _ in range(min(MAX_BATCH, len(self._events)))]

    def gauges(self) -> dict[str, float]:
        """Return how many routes share memory, and how often it was done without."""
        proven = sum(shared.is_proven for shared in list(self._owned.values()))
        door = self._door
        return {
            **self._inner.gauges(),
            "kv_shared_links": proven + len(self._mapped),
            "kv_shared_visitors": 0 if door is None else door.num_visitors,
            "kv_shared_bytes_total": self._shared_bytes,
            "kv_shared_fallbacks_total": self._num_fallbacks,
            "kv_shared_overflows_total": self._num_overflows,
        }

    def wake(self) -> None:
        """End a poll."""
        self._inner.wake()

    def close(self) -> None:
        """Drop all routes, and all memory."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inner.close()
        for route in [*self._owned, *self._mapped]:
            self._forget(route)
        if self._door is not None:
            self._door.close()
        self._tell_released()

    # --- what arrives --------------------------------------------------------------------------------------------------

    def _see(self, event: ChannelEvent, free: dict[Route, list[int]]) -> None:
        match event:
            case Connected(route):
                if not self._offer(route):
                    self._events.append(event)
            case Lost(route):
                self._forget(route)
                self._events.append(event)
            case Arrived(route, frames):
                if len(frames) != 1 or not self._is_ours(route, frames[0], free):
                    self._events.append(event)

    def _is_ours(self, route: Route, frame: bytes | memoryview, free: dict[Route, list[int]]) -> bool:
        """Deal with a frame between the two channels; False for one that the protocol above shall judge."""
        kind, body = bytes(frame[:_KIND_BYTES]), frame[_KIND_BYTES:]
        if kind == DATA and (mapped := self._mapped.get(route)) is not None and len(body) >= _PLACE.size:
            slot, start, num_bytes = _PLACE.unpack(body[: _PLACE.size])
            payload = mapped.copy(start, num_bytes) if num_bytes <= MAX_FRAME_BYTES else None
            if payload is None:
                return False
            self._shared_bytes += num_bytes
            free.setdefault(route, []).append(slot)
            self._events.append(Arrived(route, (body[_PLACE.size :], payload)))
        elif kind == FREE and (shared := self._owned.get(route)) is not None and is_slot_list(body):
            self._released.extend(shared.slots.given_back(body))
        elif kind == CLAIM and self._door is not None and len(body) == TOKEN_BYTES and route not in self._mapped:
            self._answer(route, bytes(body), self._door)
        elif kind in (SEEN, UNSEEN) and (shared := self._owned.get(route)) is not None and not shared.is_proven:
            self._judge(route, shared, kind, bytes(body))
        elif kind in (SEEN, UNSEEN) and route in self._port_of and route not in self._owned:
            pass  # The answer to a claim that was given up: the route goes without, and is as good as any.
        else:
            return False
        return True

    # --- the proof -----------------------------------------------------------------------------------------------------

    def _offer(self, route: Route) -> bool:
        """Pass memory to the other end of a new route and claim it there; False if the route goes without."""
        port = self._port_of[route]
        try:
            arena = OwnedArena(NUM_SLOTS, MAX_FRAME_BYTES)
        except OSError as error:
            self._falls_back(f"port {port}", f"no memory to share ({error})")
            return False
        try:
            arena.pass_to(port)
        except SharingRefused as refused:
            arena.close()
            self._falls_back(f"port {port}", str(refused))
            return False
        if not self._inner.send(route, CLAIM + arena.token):
            arena.close()
            return False
        slots = LentSlots(NUM_SLOTS, MAX_FRAME_BYTES, arena.slot)
        self._owned[route] = _Shared(arena, slots, self._clock.now_s() + PROOF_WAIT_S)
        return True

    def _answer(self, route: Route, token: bytes, door: ArenaDoor) -> None:
        try:
            mapped = door.take(token)
        except SharingRefused as refused:
            self._falls_back(route.hex(), str(refused))
            self._inner.send(route, UNSEEN + str(refused).encode()[:200])
            return
        self._mapped[route] = mapped
        self._inner.send(route, SEEN + mapped.nonce)

    def _judge(self, route: Route, shared: _Shared, kind: bytes, body: bytes) -> None:
        if kind == SEEN and len(body) == NONCE_BYTES and body == shared.arena.nonce:
            shared.is_proven = True
            _logger.info("KV to port %d of this host goes through shared memory", self._port_of[route])
        else:
            self._go_without(route, "it sees other memory" if kind == SEEN else body.decode("utf-8", "replace"))
        self._events.append(Connected(route))

    def _expire(self, now_s: float) -> None:
        for route, shared in list(self._owned.items()):
            if not shared.is_proven and now_s >= shared.due_s:
                self._go_without(route, f"no answer within {PROOF_WAIT_S} s")
                self._events.append(Connected(route))

    def _wait_s(self, timeout_s: float | None) -> float | None:
        due = [shared.due_s for shared in self._owned.values() if not shared.is_proven]
        if not due:
            return timeout_s
        wait_s = max(0.0, min(due) - self._clock.now_s())
        return wait_s if timeout_s is None else min(timeout_s, wait_s)

    def _go_without(self, route: Route, reason: str) -> None:
        self._owned.pop(route).arena.close()
        self._falls_back(f"port {self._port_of[route]}", reason)

    def _falls_back(self, place: str, reason: str) -> None:
        self._num_fallbacks += 1
        _logger.info("KV of %s goes over TCP, not through shared memory: %s", place, reason)

    # --- ends ----------------------------------------------------------------------------------------------------------

    def _forget(self, route: Route) -> None:
        """The route is gone: what it shared is of no use any more, and what was lent comes back."""
        self._port_of.pop(route, None)
        if (shared := self._owned.pop(route, None)) is not None:
            self._released.extend(shared.slots.give_up())
            shared.arena.close()
        if (mapped := self._mapped.pop(route, None)) is not None:
            mapped.close()

    def _tell_released(self) -> None:
        while self._released:
            self._released.popleft()()


def _port(address: str) -> int:
    """Return the port of `tcp://HOST:PORT`; 0, at which nobody listens, for what is no such address."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0
