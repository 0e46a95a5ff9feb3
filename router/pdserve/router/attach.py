"""One address's Attach stream: connect, say hello, carry messages both ways, notice the end, and start again."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import grpc

from pdserve.core.clock import Clock
from pdserve.core.errors import NoNodes
from pdserve.core.ids import Incarnation
from pdserve.router import pb_nodes
from pdserve.router.events import LegEvent
from pdserve.router.lease import Lease
from pdserve.router.membership import Member, Membership
from pdserve.router.nodes import Hello, NodeState
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.options import channel_options
from pdserve.rpc.secret import secret_metadata
from pdserve.v1 import node_pb2, node_pb2_grpc

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
MAX_UNSENT_BYTES = 64 << 20
"""Submits and cancels that may wait for a node's stream; beyond it the stream counts as broken."""
CLOSED = "the node closed the stream"

logger = logging.getLogger(__name__)

Call = grpc.aio.StreamStreamCall[node_pb2.AttachRequest, node_pb2.AttachResponse]
OnEvent = Callable[[int, LegEvent], None]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What every stream of this router says and heeds. `next_number` numbers the streams, upwards."""

    incarnation: Incarnation
    lease_s: float
    beat_s: float
    secret: bytes | None
    next_number: Callable[[], int]


class StreamEnded(Exception):
    """The stream is over; `state` is how the node stands now."""

    def __init__(self, state: NodeState, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


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

    async def run(self) -> None:
        """Attach again and again, with a pause that doubles up to `MAX_BACKOFF_S` and starts afresh after a hello."""
        while True:
            ended = StreamEnded(NodeState.DOWN, "the router stops")
            try:
                await self._attach()
            except* StreamEnded as group:
                ended = _first(group)
            finally:
                self._membership.detached(self._member, ended.state, ended.reason)
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)

    async def _attach(self) -> None:
        async with grpc.aio.insecure_channel(self._member.address, options=channel_options()) as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            call: Call = stub.Attach(metadata=secret_metadata(self._settings.secret))
            try:
                hello = await self._greet(call)
                outgoing, self._writing_since_s = Outgoing(), None
                lease = Lease(self._settings.lease_s, self._settings.beat_s, self._clock.now_s())
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write(call, outgoing))
                    tasks.create_task(self._watch(lease, outgoing))
                    self._backoff_s = FIRST_BACKOFF_S
                    self._membership.attached(self._member, hello, outgoing.put)
                    await self._read(call, hello, lease)
            finally:
                call.cancel()

    async def _greet(self, call: Call) -> Hello:
        """Say hello, and return the node's. Raises StreamEnded if the node cannot be used."""
        settings = self._settings
        message = pb_nodes.hello_message(settings.incarnation, settings.next_number(), settings.lease_s)
        with _ends_stream():
            async with asyncio.timeout(settings.lease_s):
                await call.write(message)
                answer = await call.read()
        if not isinstance(answer, node_pb2.AttachResponse):
            raise StreamEnded(NodeState.DOWN, CLOSED)
        if answer.WhichOneof("message") != "hello":
            raise StreamEnded(NodeState.REFUSED, "the first message was no hello")
        try:
            hello = pb_nodes.hello_from_pb(answer.hello)
        except ValueError as error:
            raise StreamEnded(NodeState.REFUSED, f"its hello makes no sense: {error}") from None
        refusal = self._membership.refusal(self._member, hello)
        if refusal is not None:
            raise StreamEnded(NodeState.REFUSED, refusal)
        return hello

    async def _read(self, call: Call, hello: Hello, lease: Lease) -> NoReturn:
        while True:
            with _ends_stream():
                message = await call.read()
            if not isinstance(message, node_pb2.AttachResponse):
                raise StreamEnded(NodeState.DOWN, CLOSED)
            lease.heard(self._clock.now_s())
            match message.WhichOneof("message"):
                case "step":
                    for session_id, event in pb_nodes.events_from_pb(hello.incarnation, message.step):
                        self._on_event(session_id, event)
                case "status":
                    self._membership.status(self._member, pb_nodes.status_from_pb(message.status))
                case "beat":
                    pass
                case _:
                    logger.warning("a message from a node is of no use here", extra={"peer": self._member.address})

    async def _write(self, call: Call, outgoing: Outgoing) -> None:
        while True:
            message = await outgoing.get()
            self._writing_since_s = self._clock.now_s()
            with _ends_stream():
                await call.write(message)
            self._writing_since_s = None

    async def _watch(self, lease: Lease, outgoing: Outgoing) -> None:
        """Beat, and end the stream when the node is silent, or takes nothing, for longer than the lease."""
        while True:
            await asyncio.sleep(self._settings.beat_s)
            now_s = self._clock.now_s()
            if lease.is_expired(now_s):
                raise StreamEnded(NodeState.DOWN, f"silent for {self._settings.lease_s:g} s")
            blocked_s = 0.0 if self._writing_since_s is None else now_s - self._writing_since_s
            if outgoing.is_broken or blocked_s > self._settings.lease_s:
                raise StreamEnded(NodeState.DOWN, "the node does not read its stream")
            if blocked_s == 0.0:
                outgoing.put(pb_nodes.beat_message())


@contextlib.contextmanager
def _ends_stream() -> Iterator[None]:
    """Turn what grpc raises for a broken stream into StreamEnded."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _ended(error) from None
    except TimeoutError:
        raise StreamEnded(NodeState.DOWN, "no hello in time") from None
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
        raise StreamEnded(NodeState.DOWN, f"the stream broke: {error}") from None


def _ended(error: grpc.aio.AioRpcError) -> StreamEnded:
    typed = error_from_rpc(error)
    if isinstance(typed, NoNodes) and typed.retry_after_s is not None:
        return StreamEnded(NodeState.LOADING, typed.message)
    return StreamEnded(NodeState.DOWN, f"{error.code().name.lower()}: {typed.message}")


def _first(group: BaseExceptionGroup[StreamEnded]) -> StreamEnded:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")
