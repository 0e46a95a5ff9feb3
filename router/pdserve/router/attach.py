"""One address's Attach stream: connect, say hello, carry messages both ways, notice the end, and start again."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

from pdserve.core.clock import Clock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.ids import Incarnation
from pdserve.router import pb_nodes
from pdserve.router.attach_call import AttachCall, StreamEnded
from pdserve.router.events import LegEvent
from pdserve.router.greeting import Greeting
from pdserve.router.lease import Lease
from pdserve.router.membership import Member, Membership
from pdserve.router.nodes import ROUTER_STOPS, Hello, NodeState
from pdserve.rpc.options import channel_options
from pdserve.rpc.tls import TlsSource, open_async_channel
from pdserve.v1 import node_pb2, node_pb2_grpc

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
MAX_UNSENT_BYTES = 64 << 20
"""Submits and cancels that may wait for a node's stream; beyond it the stream counts as broken."""
STEP_LIMIT_S = 60.0
"""Age of a node's running step at which the node counts as stuck: two hundred times what a step may take."""
BEATS_PER_LEASE = 6
"""Beats that a node hears within its own lease, at least."""

logger = logging.getLogger(__name__)

OnEvent = Callable[[int, LegEvent], None]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What every stream of this router says and heeds. `next_number` numbers the streams, upwards. No `tls`: they are plain."""

    incarnation: Incarnation
    lease_s: float
    beat_s: float
    secret: ClusterSecret | None
    next_number: Callable[[], int]
    step_limit_s: float = STEP_LIMIT_S
    tls: TlsSource | None = None


class Outgoing:
    """Messages that wait to be written: bounded in bytes; putting never blocks."""

    def __init__(self) -> None:
        self._messages: deque[node_pb2.AttachRequest] = deque()
        self._wake = asyncio.Event()
        self.num_bytes = 0
        self.is_broken = False

    def put(self, message: node_pb2.AttachRequest) -> bool:
        """Add a message. False, for ever after, once the bound was passed."""
        if self.num_bytes + message.ByteSize() > MAX_UNSENT_BYTES:
            self.is_broken = True
        if self.is_broken:
            return False
        self._messages.append(message)
        self.num_bytes += message.ByteSize()
        self._wake.set()
        return True

    async def get(self) -> node_pb2.AttachRequest:
        """Wait for the next message."""
        while not self._messages:
            self._wake.clear()
            await self._wake.wait()
        message = self._messages.popleft()
        self.num_bytes -= message.ByteSize()
        return message


class NodeLink:
    """Keeps one member attached until cancelled. Events go to `on_event` in the order of the stream."""

    def __init__(
        self, member: Member, membership: Membership, settings: LinkSettings, clock: Clock, on_event: OnEvent
    ) -> None:
        self._member, self._membership = member, membership
        self._settings, self._clock, self._on_event = settings, clock, on_event
        self._backoff_s = FIRST_BACKOFF_S
        self._writing_since_s: float | None = None
        self._is_over = False

    async def run(self) -> None:
        """Attach again and again, with a pause that doubles up to `MAX_BACKOFF_S` and starts afresh after a hello."""
        while True:
            self._is_over = False
            try:
                await self._attach()
            except* StreamEnded as group:
                self._over(_first(group))
            finally:
                self._over(StreamEnded(NodeState.DOWN, ROUTER_STOPS))
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)

    async def _attach(self) -> None:
        tls = self._settings.tls
        material = None if tls is None else tls.current()
        async with open_async_channel(self._member.address, material, channel_options()) as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            stream = stub.Attach()
            call = AttachCall(stream, self._broken, speaks_tls=tls is not None)
            try:
                hello = await self._greet(call)
                outgoing, self._writing_since_s = Outgoing(), None
                beat_s = self._beat_s(hello)
                lease = Lease(self._settings.lease_s, beat_s, self._clock.now_s())
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._until_over(self._write(call, outgoing)))
                    tasks.create_task(self._until_over(self._watch(lease, outgoing, beat_s)))
                    self._backoff_s = FIRST_BACKOFF_S
                    self._membership.attached(self._member, hello, outgoing.put)
                    await self._until_over(self._read(call, hello, lease))
            finally:
                call.cancel()

    async def _until_over(self, work: Coroutine[Any, Any, NoReturn]) -> NoReturn:
        """Run a part of the stream. Its end is reported here and now: closing a channel takes a while, and work goes on."""
        try:
            await work
        except StreamEnded as ended:
            self._over(ended)
            raise

    def _over(self, ended: StreamEnded) -> None:
        """Report the end of this try; only the first reason counts. Without one the last one known stays."""
        if self._is_over:
            return
        self._is_over = True
        if not ended.reason and self._member.hello is None and self._member.reason:
            return
        self._membership.detached(self._member, ended.state, ended.reason or "the stream broke")

    def _broken(self) -> None:
        self._member.is_broken = True

    def _beat_s(self, hello: Hello) -> float:
        """Return the interval of beats: this router's own, or shorter if the node's lease asks for it."""
        own_s = self._settings.beat_s
        return min(own_s, hello.lease_s / BEATS_PER_LEASE) if hello.lease_s > 0 else own_s

    async def _greet(self, call: AttachCall) -> Hello:
        """Exchange proofs and hellos, and return the node's. Raises StreamEnded if the node cannot be used."""
        its = self._settings
        greeting = Greeting(its.incarnation, its.next_number(), its.lease_s, its.secret, its.lease_s)
        answer = await greeting.exchange(call)
        try:
            hello = pb_nodes.hello_from_pb(answer)
        except ValueError as error:
            raise StreamEnded(NodeState.REFUSED, f"its hello makes no sense: {error}") from None
        refusal = self._membership.refusal(self._member, hello)
        if refusal is not None:
            raise StreamEnded(NodeState.REFUSED, refusal)
        return hello

    async def _read(self, call: AttachCall, hello: Hello, lease: Lease) -> NoReturn:
        while True:
            message = await call.read()
            now_s = self._clock.now_s()
            lease.heard(now_s)
            self._membership.heard(self._member, now_s)
            match message.WhichOneof("message"):
                case "step":
                    for session_id, event in pb_nodes.events_from_pb(hello.incarnation, message.step):
                        self._on_event(session_id, event)
                case "status":
                    self._membership.status(self._member, pb_nodes.status_from_pb(message.status))
                case "beat":
                    self._on_beat(message.beat.running_step_age_s)
                case _:
                    logger.warning("a message from a node is of no use here", extra={"peer": self._member.address})

    def _on_beat(self, step_age_s: float) -> None:
        """Heed the age of the node's running step. A stuck node is left, and not used until a beat says that it goes on."""
        was_stuck, is_stuck = self._member.is_stuck, step_age_s > self._settings.step_limit_s
        if is_stuck != was_stuck:
            self._membership.stuck(self._member, is_stuck)
        if is_stuck and not was_stuck:
            raise StreamEnded(NodeState.DOWN, f"stuck step: it runs for {step_age_s:.0f} s")

    async def _write(self, call: AttachCall, outgoing: Outgoing) -> NoReturn:
        while True:
            message = await outgoing.get()
            self._writing_since_s = self._clock.now_s()
            await call.write(message)
            self._writing_since_s = None

    async def _watch(self, lease: Lease, outgoing: Outgoing, beat_s: float) -> NoReturn:
        """Beat, and end the stream when the node is silent, or takes nothing, for longer than the lease."""
        while True:
            await asyncio.sleep(beat_s)
            now_s = self._clock.now_s()
            if lease.is_expired(now_s):
                raise StreamEnded(NodeState.DOWN, f"silent for {self._settings.lease_s:g} s")
            blocked_s = 0.0 if self._writing_since_s is None else now_s - self._writing_since_s
            if outgoing.is_broken or blocked_s > self._settings.lease_s:
                raise StreamEnded(NodeState.DOWN, "the node does not read its stream")
            if blocked_s == 0.0:
                outgoing.put(pb_nodes.beat_message())


def _first(group: BaseExceptionGroup[StreamEnded]) -> StreamEnded:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")
