"""A channel between two ends in one process, for colocated roles and tests: same contract, no sockets."""

import secrets
import threading
from collections import deque
from collections.abc import Callable

from pdserve.core.errors import AddressInUse
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import MAX_BATCH, MAX_FRAMES, Arrived, ChannelEvent, Connected, Lost, Route

MAX_QUEUED = 4096
"""Messages that may wait at one end; beyond it the sender is told that the route is lost."""


class InProcessNetwork:
    """The addresses that channels of this process can dial."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, InProcessChannel] = {}
        self._next_port = 1

    def channel(self) -> "InProcessChannel":
        """Return a new end of this network."""
        return InProcessChannel(self)

    def bind(self, host: str, port: int, channel: "InProcessChannel") -> str:
        """Give `channel` an address; port 0 picks a free one; raise AddressInUse for a taken one."""
        with self._lock:
            while port == 0 or f"inprocess://{host}:{port}" in self._listeners:
                if port:
                    raise AddressInUse(f"inprocess://{host}:{port} is taken")
                port, self._next_port = self._next_port, self._next_port + 1
                if f"inprocess://{host}:{port}" in self._listeners:
                    port = 0
            address = f"inprocess://{host}:{port}"
            self._listeners[address] = channel
            return address

    def find(self, address: str) -> "InProcessChannel | None":
        """Return who listens there."""
        with self._lock:
            return self._listeners.get(address)

    def unbind(self, channel: "InProcessChannel") -> None:
        """Take back all addresses of `channel`."""
        with self._lock:
            self._listeners = {a: other for a, other in self._listeners.items() if other is not channel}


class InProcessChannel:
    """One end. Payloads are copied, so that a sender may reuse its buffer at once."""

    def __init__(self, network: InProcessNetwork) -> None:
        self._network = network
        self._changed = threading.Condition()
        self._inbox: deque[ChannelEvent] = deque()
        self._routes: dict[Route, tuple[InProcessChannel, Route]] = {}
        self._is_woken = False
        self._is_closed = False

    def listen(self, host: str, port: int) -> str:
        """Accept connections at a name of this network."""
        return self._network.bind(host, port, self)

    def connect(self, address: str, shown: Credentials | None = None) -> Route:  # noqa: ARG002 - nobody is a stranger here
        """Dial once."""
        mine = Route(secrets.token_bytes(8))
        listener = self._network.find(address)
        theirs = listener.accept(self, mine) if listener is not None else None
        if listener is None or theirs is None:
            self.deliver(Lost(mine, f"nobody listens at {address}"))
            return mine
        with self._changed:
            self._routes[mine] = (listener, theirs)
        self.deliver(Connected(mine))
        return mine

    def trust(self, route: Route) -> None:
        """Do nothing: who is in this process is trusted."""

    def accept(self, dialler: "InProcessChannel", dialler_route: Route) -> Route | None:
        """Make the listening side of a route; None if closed. Called on the dialling thread."""
        route = Route(secrets.token_bytes(8))
        with self._changed:
            if self._is_closed:
                return None
            self._routes[route] = (dialler, dialler_route)
        return route

    def disconnect(self, route: Route) -> None:
        """Drop a route and what came on it; the other end sees `Lost`."""
        with self._changed:
            other = self._routes.pop(route, None)
            self._inbox = deque(event for event in self._inbox if event.route != route)
        if other is not None:
            other[0].hung_up(other[1])

    def hung_up(self, route: Route) -> None:
        """The other end of `route` is gone. Called on its thread."""
        with self._changed:
            known = self._routes.pop(route, None)
        if known is not None:
            self.deliver(Lost(route, "the other end closed"))

    def send(self, route: Route, header: bytes) -> bool:
        """Send one frame."""
        return self._send(route, (header,))

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        """Send a header and a payload; the payload is free again at once."""
        if not self._send(route, (header, bytes(payload))):
            return False
        on_released()
        return True

    def send_frames(self, route: Route, frames: tuple[bytes, ...]) -> bool:
        """Send any frames, also such as are no message: for tests of what strangers send."""
        return self._send(route, frames)

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        """Wait for events."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._is_woken or self._is_closed, timeout_s)
            self._is_woken = False
            return [self._inbox.popleft() for _ in range(min(MAX_BATCH, len(self._inbox)))]

    def gauges(self) -> dict[str, float]:
        """Return nothing: what waits here is counted by who sends it."""
        return {}

    def wake(self) -> None:
        """End a poll."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all routes."""
        self._network.unbind(self)
        with self._changed:
            self._is_closed = True
            routes, self._routes = self._routes, {}
            self._inbox.clear()
            self._changed.notify_all()
        for other, route in routes.values():
            other.hung_up(route)

    def deliver(self, event: ChannelEvent) -> bool:
        """Put an event into this end's inbox; False if it is full or closed. Called on the other end's thread."""
        with self._changed:
            is_full = len(self._inbox) >= MAX_QUEUED and isinstance(event, Arrived)
            if self._is_closed or is_full:
                return False
            self._inbox.append(event)
            self._changed.notify_all()
            return True

    def _send(self, route: Route, frames: tuple[bytes, ...]) -> bool:
        with self._changed:
            other = self._routes.get(route)
        if other is None:
            return False
        channel, their_route = other
        return channel.deliver(Arrived(their_route, frames[:MAX_FRAMES]))
