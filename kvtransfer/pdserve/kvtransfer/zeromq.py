"""The ZeroMQ TCP channel: one ROUTER that listens, one DEALER per dialled address.

A DEALER dials once and never reconnects by itself, since reconnection to a restarted peer would be silent. Monitors report
connections and losses. On the ROUTER's side a loss is known by file descriptor, so the descriptor that each message came in on is
remembered.

With an `Admission`, a peer gets a message, a routing id or memory only after it has shown good credentials within ZMTP's own
handshake. A ROUTER needs that: libzmq takes the frames of one message without end, and aborts the process when a peer chooses an
id that it would give itself. Until then, and on the dialling side until `trust`, a connection is a stranger's (`strangers`).
"""

import contextlib
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import zmq

from pdserve.core.errors import AddressInUse, ConfigError
from pdserve.kvtransfer.admission import Admission, Credentials
from pdserve.kvtransfer.channel import MAX_BATCH, MAX_FRAMES, Arrived, ChannelEvent, Connected, Lost, Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.curve import CurveKeys, fresh_keys
from pdserve.kvtransfer.doorkeeper import Doorkeeper
from pdserve.kvtransfer.lent_payloads import MANY_LENT, LentPayloads
from pdserve.kvtransfer.strangers import LOOK_S, Strangers

SEND_HWM = 4096
"""Messages inside one connection. DATA is bounded by its sender; this bounds control towards a peer that does not read."""
CONNECT_TIMEOUT_MS = 3000
HANDSHAKE_MS = 5000
"""Time for ZMTP's handshake, the wait for this process's own answer in it included."""
BACKLOG = 128
MAX_LOST = 64
ZAP_DOMAIN = b"pdserve"
_COMES = zmq.Event.ACCEPTED | zmq.Event.CONNECTED
_EVENTS = _COMES | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED
_FAILURES = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
CURVE_BYTES = 33
"""What encryption adds to a message: command name, nonce, tag and flags; libzmq bounds what is on the wire."""
_NO_HANDSHAKE = "no ZeroMQ handshake: another protocol, or --kv-encryption or the cluster secret differ"
_NOT_ADMITTED = "not admitted: the cluster secret differs, or the admission key is too old"
LOSSES: dict[int, str] = {
    zmq.Event.DISCONNECTED: "disconnected",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: _NO_HANDSHAKE,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _NO_HANDSHAKE,
    zmq.Event.HANDSHAKE_FAILED_AUTH: _NOT_ADMITTED,
}
_READABLE = int(zmq.POLLIN)


@dataclass(slots=True)
class _Dialled:
    """A DEALER and its monitor."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    fd: int = -1
    """Its connection's descriptor, once that stands."""


@dataclass(slots=True)
class _Listener:
    """The ROUTER, its monitor, and which route came in on which file descriptor."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    route_of_fd: dict[int, Route] = field(default_factory=dict)
    lost: deque[Route] = field(default_factory=lambda: deque(maxlen=MAX_LOST))
    """Routes whose loss was told. The ROUTER itself may learn of it a moment later, and would take what is sent till then."""


class ZeroMqChannel:
    """One process's end, with its own context and one libzmq I/O thread. Used by one thread, except `wake`.

    With `keys`, everything is encrypted, and only ends that were given the same keys understand each other. A sender that has
    but a few buffers for payloads says so by `num_buffers`: it waits for each of them. A listener without `admission` takes
    everyone who speaks ZMTP: for measurements and tests inside one process only.
    """

    def __init__(
        self, keys: CurveKeys | None = None, num_buffers: int = MANY_LENT, admission: Admission | None = None
    ) -> None:
        self._keys = keys
        self._strangers = Strangers()
        self._lent = LentPayloads(num_buffers, self.wake)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._doorkeeper: Doorkeeper | None = None
        if admission is not None:
            self._doorkeeper = Doorkeeper(self._context, admission)
            self._poller.register(self._doorkeeper.socket, zmq.POLLIN)
        self._listener: _Listener | None = None
        self._dialled: dict[Route, _Dialled] = {}
        self._numbers = count(1)
        self._wake_lock = threading.Lock()
        self._backlog: deque[ChannelEvent] = deque()
        self._is_closed = False

    def listen(self, host: str, port: int) -> str:
        """Bind the ROUTER."""
        socket = self._socket(zmq.ROUTER, is_ipv6=":" in host)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._take_keys(socket, self._keys)
        elif self._doorkeeper is not None:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        monitor = socket.get_monitor_socket(_EVENTS | _FAILURES)
        self._listener = _Listener(socket, monitor)
        place = f"tcp://[{host}]:{port or '*'}" if ":" in host else f"tcp://{host}:{port or '*'}"
        try:
            socket.bind(place)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(f"{place} is taken", hint="choose another port, or 0 for any") from error
            raise ConfigError([f"cannot listen at {place}: {error}"]) from error
        for each in (socket, monitor):
            self._poller.register(each, zmq.POLLIN)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        """Dial with a new DEALER."""
        route = Route(f"d{next(self._numbers)}".encode())
        socket = self._socket(zmq.DEALER, is_ipv6="[" in address)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public)
            self._take_keys(socket, fresh_keys())
        elif shown is not None:
            socket.setsockopt(zmq.PLAIN_USERNAME, shown.username)
            socket.setsockopt(zmq.PLAIN_PASSWORD, shown.password)
        dialled = self._dialled[route] = _Dialled(socket, socket.get_monitor_socket(_EVENTS | _FAILURES))
        for each in (dialled.socket, dialled.monitor):
            self._poller.register(each, zmq.POLLIN)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.disconnect(route)
            self._backlog.append(Lost(route, f"cannot dial {address}: {error}"))
        return route

    def trust(self, route: Route) -> None:
        """Stop watching how much comes on a dialled route."""
        dialled = self._dialled.get(route)
        if dialled is not None:
            self._strangers.forget(dialled.fd)

    def disconnect(self, route: Route) -> None:
        """Close the DEALER of a dialled route, or forget an accepted one."""
        self._backlog = deque(event for event in self._backlog if event.route != route)
        dialled = self._dialled.pop(route, None)
        if dialled is not None:
            self._strangers.forget(dialled.fd)
            self._close_pair(dialled.socket, dialled.monitor)
        elif self._listener is not None:
            fds = self._listener.route_of_fd
            for fd in [fd for fd, known in fds.items() if known == route]:
                del fds[fd]

    def send(self, route: Route, header: bytes) -> bool:
        """Send one frame."""
        socket, prefix = self._towards(route)
        if socket is None:
            return False
        try:
            socket.send_multipart([*prefix, header], zmq.DONTWAIT)
        except zmq.ZMQError:
            # EAGAIN: not connected, or a peer that reads nothing; EHOSTUNREACH: the ROUTER knows no such peer.
            return False
        return True

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        """Send a header and, without copying, a payload."""
        socket, prefix = self._towards(route)
        if socket is None:
            return False
        lent, sign = self._lent.view(payload)
        try:
            tracker = socket.send_multipart([*prefix, header, lent], zmq.DONTWAIT, copy=False, track=True)
        except zmq.ZMQError:
            return False
        assert tracker is not None
        self._lent.add(tracker, on_released, sign)
        return True

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        """Wait for events. While payloads are lent out it returns early to look after them."""
        if self._backlog:
            return self._next_batch()
        if self._lent.reap():
            timeout_s = 0.0
        looks_s = [timeout_s, self._lent.next_look_s(), LOOK_S if self._strangers else None]
        timeout_s = min((look_s for look_s in looks_s if look_s is not None), default=None)
        timeout_ms = None if timeout_s is None else max(0, -int(-timeout_s * 1000 // 1))
        ready = {source for source, _ in self._poller.poll(timeout_ms)}
        if self._wake_in in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_in, 4096)
        if self._doorkeeper is not None and self._doorkeeper.socket in ready:
            self._doorkeeper.answer()
        self._backlog.extend(self._listener_events(ready))
        for route, dialled in list(self._dialled.items()):
            self._backlog.extend(self._dialled_events(route, dialled, ready))
        if self._strangers:
            self._strangers.cut()
        self._lent.reap()
        return self._next_batch()

    def watch(self, fd: int) -> None:
        """End `poll` when this descriptor is readable, too. Whoever reads it does so after every poll."""
        self._poller.register(fd, zmq.POLLIN)

    def gauges(self) -> dict[str, float]:
        """Return what became of strangers. DATA inside sockets is counted by who sends it."""
        refused = 0 if self._doorkeeper is None else self._doorkeeper.num_refused
        return {
            "kv_strangers": len(self._strangers),
            "kv_strangers_cut_total": self._strangers.num_cut,
            "kv_not_admitted_total": refused,
        }

    def wake(self) -> None:
        """Write a byte into the pipe; a full pipe will wake the poll anyway."""
        # The lock keeps a late wake from writing into a descriptor that `close` gave up and someone else got.
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._wake_out, b"\0")

    def close(self) -> None:
        """Close all sockets and the context."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._wake_in)
            os.close(self._wake_out)
        for dialled in self._dialled.values():
            self._close_pair(dialled.socket, dialled.monitor)
        self._dialled.clear()
        if self._listener is not None:
            self._close_pair(self._listener.socket, self._listener.monitor)
            self._listener = None
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()
        self._lent.release_all()

    def _socket(self, kind: int, is_ipv6: bool) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + (CURVE_BYTES if self._keys is not None else 0))
        socket.setsockopt(zmq.IPV6, int(is_ipv6))
        return socket

    @staticmethod
    def _take_keys(socket: "zmq.Socket[bytes]", keys: CurveKeys) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)

    def _close_pair(self, socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        for each in (socket, monitor):
            if each in self._poller:
                self._poller.unregister(each)
        # An open monitor would make the context's `term` wait for ever.
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)

    def _towards(self, route: Route) -> "tuple[zmq.Socket[bytes] | None, list[bytes]]":
        dialled = self._dialled.get(route)
        if dialled is not None:
            return dialled.socket, []
        listener = self._listener
        return (None, []) if listener is None or route in listener.lost else (listener.socket, [route])

    def _listener_events(self, ready: set[object]) -> Iterator[ChannelEvent]:
        """Yield arrivals, then losses.

        Messages are read before the monitor, and descriptors are noted after it: so a loss of an older connection on a descriptor
        that was used again is never taken for a loss of the newer one.
        """
        listener = self._listener
        if listener is None:
            return
        fresh: dict[int, Route] = {}
        num_read = 0
        if listener.socket in ready:
            for frames in self._received(listener.socket):
                num_read += 1
                if len(frames) < 2:
                    continue
                route = Route(frames[0].bytes)
                # Without a descriptor the loss of the route shows when it is next sent on, or by its lease.
                with contextlib.suppress(zmq.ZMQError):
                    fd = int(frames[1].get(zmq.SRCFD))
                    fresh[fd] = route
                    # It was admitted, or else its message would not be here.
                    self._strangers.forget(fd)
                yield Arrived(route, tuple(frame.buffer for frame in frames[1:]))
        # With more messages to read, losses wait: what came before a loss is delivered before it.
        if num_read < MAX_BATCH:
            for event, fd in self._monitored(listener.monitor):
                if event == zmq.Event.ACCEPTED:
                    self._strangers.came(fd, is_accepted=True)
                elif event == zmq.Event.DISCONNECTED:
                    self._strangers.forget(fd)
                if event == zmq.Event.DISCONNECTED and (lost := listener.route_of_fd.pop(fd, None)):
                    listener.lost.append(lost)
                    yield Lost(lost, "disconnected")
        for fd, route in fresh.items():
            before = listener.route_of_fd.get(fd)
            if before is not None and before != route:
                listener.lost.append(before)
                yield Lost(before, "disconnected")
            listener.route_of_fd[fd] = route

    def _dialled_events(self, route: Route, dialled: _Dialled, ready: set[object]) -> Iterator[ChannelEvent]:
        num_read = 0
        if dialled.socket in ready:
            for frames in self._received(dialled.socket):
                num_read += 1
                yield Arrived(route, tuple(frame.buffer for frame in frames))
        if dialled.monitor not in ready or num_read >= MAX_BATCH:
            return
        for event, value in self._monitored(dialled.monitor):
            if event == zmq.Event.CONNECTED:
                dialled.fd = value
                self._strangers.came(value, is_accepted=False)
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                yield Connected(route)
            else:
                yield Lost(route, LOSSES.get(event, "cannot connect"))

    @staticmethod
    def _received(socket: "zmq.Socket[bytes]") -> Iterator[list[zmq.Frame]]:
        """Yield up to a batch of messages, of each only the first frames."""
        for _ in range(MAX_BATCH):
            # Asking first costs a fifth of the exception that an empty socket answers with.
            if not _is_readable(socket):
                return
            try:
                frames = [socket.recv(zmq.DONTWAIT, copy=False)]
            except zmq.Again:  # what was there went with its peer
                return
            while frames[-1].more:
                frame = socket.recv(zmq.DONTWAIT, copy=False)
                if len(frames) <= MAX_FRAMES:
                    frames.append(frame)
                elif not frame.more:
                    break
            yield frames

    @staticmethod
    def _monitored(monitor: "zmq.Socket[bytes]") -> Iterator[tuple[int, int]]:
        """Yield (event, value) of a monitor; the value of a loss is the file descriptor."""
        while _is_readable(monitor):
            try:
                frames = monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event, value = struct.unpack("<HI", frames[0])
            yield event, value

    def _next_batch(self) -> list[ChannelEvent]:
        return [self._backlog.popleft() for _ in range(min(MAX_BATCH, len(self._backlog)))]


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)
