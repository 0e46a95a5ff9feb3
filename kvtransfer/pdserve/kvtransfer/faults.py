"""A worse link for experiments and tests: faults by rate or by number on what this end sends. Never for service.

`FaultPlan` decides, `FaultyChannel` carries out. What meets no fault, and overtakes nothing that is held, goes straight through.
"""

import logging
from collections.abc import Callable
from random import Random

from pdserve.core.clock import Clock
from pdserve.core.link_faults import FaultKind, LinkFaults
from pdserve.kvtransfer.channel import Channel, Route
from pdserve.kvtransfer.holding import Held, HoldingChannel

_logger = logging.getLogger(__name__)


class FaultPlan:
    """Which fault the next frame meets. The same faults and seed give the same plan."""

    def __init__(self, faults: LinkFaults) -> None:
        self._faults = faults
        self._random = Random(faults.seed)  # noqa: S311 - an experiment that can be repeated, no secret
        self._num_frames = 0

    def next(self) -> FaultKind | None:
        """Return what happens to the next frame."""
        self._num_frames += 1
        drawn = self._random.random()
        for kind, number in self._faults.at:
            if number == self._num_frames:
                return kind
        for kind, rate in self._faults.rates:
            if drawn < rate:
                return kind
            drawn -= rate
        return None

    def below(self, bound: int) -> int:
        """Return a number in [0, bound): where to cut, or which bit to change."""
        return self._random.randrange(bound)


class FaultyChannel(HoldingChannel):
    """Carries out a fault plan on what is sent; what arrives is left alone."""

    def __init__(self, inner: Channel, faults: LinkFaults, clock: Clock) -> None:
        super().__init__(inner, clock)
        self._faults = faults
        self._plan = FaultPlan(faults)
        self._stalled_until: dict[Route, float] = {}
        self._waits_for_next: dict[Route, Held] = {}
        """Frames that change places with the next one on their route."""
        self.num_injected = dict.fromkeys(FaultKind, 0)

    def send(self, route: Route, header: bytes) -> bool:
        """Send one frame, or what the plan makes of it."""
        return self._send(route, header, None, None)

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        """Send a header and a payload, or what the plan makes of them."""
        return self._send(route, header, payload, on_released)

    def gauges(self) -> dict[str, float]:
        """Return what was done so far."""
        return {**super().gauges(), "kv_faults_injected_total": sum(self.num_injected.values())}

    def _send(
        self, route: Route, header: bytes, payload: memoryview | None, on_released: Callable[[], None] | None
    ) -> bool:
        if not self._can_hold(route):
            return False
        now_s = self._clock.now_s()
        self._flush(now_s)
        if route not in self._routes:
            return False
        kind = self._plan.next()
        due_s = max(now_s, self._stalled_until.get(route, now_s))
        if kind is None and due_s <= now_s and route not in self._waits_for_next:
            if payload is None or on_released is None:
                return self._inner.send(route, header)
            return self._inner.send_data(route, header, payload, on_released)
        copy = None if payload is None else bytes(payload)
        if on_released is not None:
            self._release_at(now_s, on_released)
        if kind is not None:
            self.num_injected[kind] += 1
            _logger.debug("fault injected: %s of a frame of %d bytes", kind, len(header) + len(copy or b""))
        self._carry_out(kind, route, header, copy, now_s, due_s)
        self._flush(now_s)
        return True

    def _carry_out(
        self, kind: FaultKind | None, route: Route, header: bytes, payload: bytes | None, now_s: float, due_s: float
    ) -> None:
        """Hold the frame as the fault wants it; the one that waited for it follows."""
        before = self._waits_for_next.pop(route, None)
        match kind:
            case FaultKind.DISCONNECT:
                self._lose(route, "a fault was injected: disconnect")
                return
            case FaultKind.DROP:
                pass
            case FaultKind.DUPLICATE:
                self._hold(route, header, payload, due_s)
                self._hold(route, header, payload, due_s)
            case FaultKind.DELAY:
                self._hold(route, header, payload, due_s + self._faults.hold_s)
            case FaultKind.REORDER:
                self._waits_for_next[route] = self._hold(route, header, payload, due_s + self._faults.hold_s)
            case FaultKind.STALL:
                due_s = self._stalled_until[route] = max(due_s, now_s + self._faults.pause_s)
                self._hold(route, header, payload, due_s)
            case FaultKind.TRUNCATE:
                self._hold(route, *self._cut(header, payload), due_s)
            case FaultKind.CORRUPT:
                self._hold(route, *self._flip(header, payload), due_s)
            case None:
                self._hold(route, header, payload, due_s)
        if before is not None and not before.is_void:
            self._void(before)
            self._hold(route, before.header, before.payload, due_s)

    def _cut(self, header: bytes, payload: bytes | None) -> tuple[bytes, bytes | None]:
        if payload:
            return header, payload[: max(1, self._plan.below(len(payload)))]
        return header[: self._plan.below(len(header))] if header else header, payload

    def _flip(self, header: bytes, payload: bytes | None) -> tuple[bytes, bytes | None]:
        damaged = bytearray(payload or header)
        if damaged:
            bit = self._plan.below(8 * len(damaged))
            damaged[bit // 8] ^= 1 << bit % 8
        return (header, bytes(damaged)) if payload else (bytes(damaged), payload)

    def _forget(self, route: Route) -> None:
        super()._forget(route)
        self._stalled_until.pop(route, None)
        self._waits_for_next.pop(route, None)
