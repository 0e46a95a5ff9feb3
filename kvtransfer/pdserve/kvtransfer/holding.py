"""What channel decorators share that keep frames for a while before the transport gets them.

Time comes from a clock that tests may hold still. Nothing polls: a wait ends when a frame is due, and with none held it is the
transport's own.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdserve.core.clock import Clock
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import MAX_BATCH, Channel, ChannelEvent, Lost, Route

MAX_HELD = 4096
"""Frames that may be held; beyond it a route counts as lost, as with a transport's own full queue."""


@dataclass(slots=True, order=True)
class Held:
    """A frame on its way to the transport. `payload` is a copy of its own."""

    due_s: float
    number: int
    route: Route = field(compare=False)
    header: bytes = field(compare=False)
    payload: bytes | None = field(compare=False)
    is_void: bool = field(default=False, compare=False)
    """It is gone already: sent, dropped, or in another place."""


class HoldingChannel:
    """A channel around another one. Subclasses decide in `send` and `send_data` what is held, and until when."""

    def __init__(self, inner: Channel, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._routes: set[Route] = set()
        """Routes that the transport can send on, as far as it said."""
        self._held: list[Held] = []
        self._num_held = 0
        self._number = 0
        self._releases: list[tuple[float, int, Callable[[], None]]] = []
        self._events: deque[ChannelEvent] = deque()
        self._is_closed = False

    def listen(self, host: str, port: int) -> str:
        """Listen on the transport."""
        return self._inner.listen(host, port)

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        """Dial on the transport."""
        return self._inner.connect(address, shown)

    def trust(self, route: Route) -> None:
        """Pass it on."""
        self._inner.trust(route)

    def disconnect(self, route: Route) -> None:
        """Drop the route, and what is held for it."""
        self._forget(route)
        self._events = deque(event for event in self._events if event.route != route)
        self._inner.disconnect(route)

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        """Wait for events, or until something held is due."""
        if self._is_closed:
            return []
        now_s = self._clock.now_s()
        self._flush(now_s)
        if self._events:
            timeout_s = 0.0
        elif (due_s := self.next_due_s()) is not None:
            wait_s = max(0.0, due_s - now_s)
            timeout_s = wait_s if timeout_s is None else min(timeout_s, wait_s)
        self._events.extend(self._seen(self._inner.poll(timeout_s)))
        self._flush(self._clock.now_s())
        return [self._events.popleft() for _ in range(min(MAX_BATCH, len(self._events)))]

    def wake(self) -> None:
        """End a poll."""
        self._inner.wake()

    def close(self) -> None:
        """Close the transport; what is held is lost and all payloads are released."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inner.close()
        self._held.clear()
        self._num_held = 0
        for _, _, on_released in self._releases:
            on_released()
        self._releases.clear()

    def gauges(self) -> dict[str, float]:
        """Return how many frames are held, here and further in, and the transport's other gauges."""
        inner = self._inner.gauges()
        return {**inner, "kv_held_frames": self._num_held + inner.get("kv_held_frames", 0)}

    def next_due_s(self) -> float | None:
        """Return when the next frame or buffer is due, here or further in."""
        due = [self._held[0].due_s] if self._held else []
        due += [self._releases[0][0]] if self._releases else []
        if isinstance(self._inner, HoldingChannel) and (inner_s := self._inner.next_due_s()) is not None:
            due.append(inner_s)
        return min(due, default=None)

    def _can_hold(self, route: Route) -> bool:
        return route in self._routes and self._num_held < MAX_HELD

    def _hold(self, route: Route, header: bytes, payload: bytes | None, due_s: float) -> Held:
        """Keep a frame until `due_s`; frames that are due at the same time keep their order."""
        self._number += 1
        held = Held(due_s, self._number, route, header, payload)
        heapq.heappush(self._held, held)
        self._num_held += 1
        return held

    def _void(self, held: Held) -> None:
        if not held.is_void:
            held.is_void = True
            self._num_held -= 1

    def _release_at(self, due_s: float, on_released: Callable[[], None]) -> None:
        """Give a buffer back at `due_s`, from within `poll` or `close`."""
        self._number += 1
        heapq.heappush(self._releases, (due_s, self._number, on_released))

    def _lose(self, route: Route, reason: str) -> None:
        """The route is of no use any more: say so once."""
        self._forget(route)
        self._inner.disconnect(route)
        self._events.append(Lost(route, reason))

    def _forget(self, route: Route) -> None:
        self._routes.discard(route)
        for held in self._held:
            if held.route == route:
                self._void(held)

    def _flush(self, now_s: float) -> None:
        """Hand what is due to the transport, and buffers back to their owners."""
        while self._releases and self._releases[0][0] <= now_s:
            heapq.heappop(self._releases)[2]()
        while self._held and self._held[0].due_s <= now_s:
            held = heapq.heappop(self._held)
            if held.is_void:
                continue
            self._void(held)
            if not self._pass_on(held):
                self._lose(held.route, "cannot send")

    def _pass_on(self, held: Held) -> bool:
        if held.payload is None:
            return self._inner.send(held.route, held.header)
        return self._inner.send_data(held.route, held.header, memoryview(held.payload), _nothing)

    def _seen(self, events: Iterable[ChannelEvent]) -> Iterable[ChannelEvent]:
        """Learn from the transport's events which routes there are."""
        for event in events:
            if isinstance(event, Lost):
                self._forget(event.route)
            else:
                self._routes.add(event.route)
            yield event


def _nothing() -> None:
    """A copy of our own needs no release."""
