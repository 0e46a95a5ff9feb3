"""How frames travel: the interface of every transport, whose contract suite is `tests/contract/test_channel.py`.

A channel is used by one thread, except `wake`. Per route, frames arrive in order, whole and at most once; what was accepted for
sending may be lost without a word when the route is lost, which is why the protocol above has its own answers and leases.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType, Protocol, runtime_checkable

from pdserve.kvtransfer.admission import Credentials

Route = NewType("Route", bytes)
"""One connection as its channel names it. A new connection is a new route, also between the same two processes."""

MAX_FRAMES = 4
"""Frames of one message that a channel hands over; of a stranger's longer message the rest is thrown away."""
MAX_BATCH = 64
"""Most events that one `poll` returns."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came. The frames are valid as long as they are referenced."""

    route: Route
    frames: tuple[bytes | memoryview, ...]


@dataclass(frozen=True, slots=True)
class Connected:
    """A dialled route can be sent on."""

    route: Route


@dataclass(frozen=True, slots=True)
class Lost:
    """A route is gone for good. Messages that came before it are delivered before it."""

    route: Route
    reason: str


ChannelEvent = Arrived | Connected | Lost


class Channel(Protocol):
    """One process's end of a transport. What was accepted for sending leaves while this end is polled, or by itself."""

    def listen(self, host: str, port: int) -> str:
        """Accept connections; return the address that others dial. Port 0 picks a free one.

        Raises `core.errors.AddressInUse` for a port that is taken.
        """
        ...

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        """Dial once, without retrying. `Connected` or `Lost` follows. Show `shown` to a listener that asks who comes."""
        ...

    def trust(self, route: Route) -> None:
        """The peer at the end of a dialled route has proven itself. Until then it may send no more than a greeting."""
        ...

    def disconnect(self, route: Route) -> None:
        """Drop a route that was dialled here, or forget one that was accepted; no `Lost` follows."""
        ...

    def send(self, route: Route, header: bytes) -> bool:
        """Send one frame without blocking; False if the route cannot take it, which the caller treats as a lost route."""
        ...

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        """Send a header and a payload frame without blocking.

        If it returns True, `payload` may not be written to until `on_released` is called, from within `poll`, `send_data` or
        `close`; that is no acknowledgement of delivery.
        """
        ...

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        """Wait until something happens, `wake` is called or the time is over (None: no end); return what happened.

        At most `MAX_BATCH` events; the next call returns the rest.
        """
        ...

    def gauges(self) -> dict[str, float]:
        """Return gauges of its own by name, without waiting; all without `_total` go back to where they began. Any thread."""
        ...

    def wake(self) -> None:
        """End a running or the next `poll` early. May be called from any thread, also after `close`."""
        ...

    def close(self) -> None:
        """Drop all routes and free everything; all payloads are released. May be called twice."""
        ...


@runtime_checkable
class LendingChannel(Protocol):
    """A channel with memory of its own to pack payloads into, which it then sends without a copy."""

    def lend(self, route: Route, num_bytes: int) -> memoryview | None:
        """Return writable memory of that size; None if there is none now.

        It may be used until the next `lend`, or until `send_data` took it: from then on it is as any payload.
        """
        ...
