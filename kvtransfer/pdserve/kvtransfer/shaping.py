"""A slower link for experiments: bandwidth, latency and jitter on what this end sends.

`ShapedLine` computes, without a clock of its own, when each frame leaves and arrives; `ShapedChannel` waits accordingly. Shape
both ends to shape both directions. Frames are handed over late by what the transport's wait is coarse (up to 1 ms with ZeroMQ),
but that does not add up: the line's times follow from its own clock alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from pdserve.core.clock import Clock
from pdserve.core.link_shape import LinkShape
from pdserve.kvtransfer.channel import Channel, Route
from pdserve.kvtransfer.holding import HoldingChannel


@dataclass(frozen=True, slots=True)
class Passage:
    """When the last bit of a frame is on the line, and when it comes out at the other end."""

    leaves_s: float
    arrives_s: float


class ShapedLine:
    """One direction of one connection."""

    def __init__(self, shape: LinkShape, seed: int = 0) -> None:
        self._shape = shape
        self._random = Random(seed)  # noqa: S311 - an experiment that can be repeated, no secret
        self._free_s = 0.0
        self._last_arrival_s = 0.0

    def admit(self, num_bytes: int, now_s: float) -> Passage:
        """Put a frame behind those before it."""
        self._free_s = max(self._free_s, now_s) + 8 * num_bytes / self._shape.bits_per_s
        arrives_s = self._free_s + self._shape.latency_s
        if self._shape.jitter_s:
            arrives_s += self._shape.jitter_s * self._random.random()
        self._last_arrival_s = max(self._last_arrival_s, arrives_s)
        return Passage(self._free_s, self._last_arrival_s)


class ShapedChannel(HoldingChannel):
    """Sends as over a link of the given shape. A payload counts as inside the socket until its last bit left."""

    def __init__(self, inner: Channel, shape: LinkShape, clock: Clock, seed: int = 0) -> None:
        super().__init__(inner, clock)
        self._shape = shape
        self._seed = seed
        self._lines: dict[Route, ShapedLine] = {}

    def send(self, route: Route, header: bytes) -> bool:
        """Send one frame, later."""
        if not self._can_hold(route):
            return False
        now_s = self._clock.now_s()
        self._hold(route, header, None, self._line(route).admit(len(header), now_s).arrives_s)
        self._flush(now_s)
        return True

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        """Send a header and a payload, later."""
        if not self._can_hold(route):
            return False
        passage = self._line(route).admit(len(header) + len(payload), self._clock.now_s())
        self._hold(route, header, bytes(payload), passage.arrives_s)
        self._release_at(passage.leaves_s, on_released)
        return True

    def gauges(self) -> dict[str, float]:
        """Return that the link is shaped, and what is held."""
        return {**super().gauges(), "kv_link_shaped": 1}

    def _line(self, route: Route) -> ShapedLine:
        line = self._lines.get(route)
        if line is None:
            line = self._lines[route] = ShapedLine(self._shape, self._seed + len(self._lines))
        return line

    def _forget(self, route: Route) -> None:
        super()._forget(route)
        self._lines.pop(route, None)
