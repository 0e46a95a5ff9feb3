"""The NodeService of both roles: attached routers, drain, and the debug dump."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NoReturn, cast

import grpc

from pdserve.core.build import ProcessInfo, process_as_json
from pdserve.core.clock import Clock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import InvalidRequest, NoNodes, PdserveError, Unauthenticated
from pdserve.core.ids import Incarnation
from pdserve.node import pb
from pdserve.node.attach import RouterStream, StreamSettings
from pdserve.node.desk import Desk
from pdserve.node.greeting import Greetings, Strangers
from pdserve.node.legs import Legs
from pdserve.node.named_peers import NamedPeers
from pdserve.node.pb import Peer
from pdserve.rpc.errors import abort_with
from pdserve.rpc.process import process_to_pb
from pdserve.rpc.tickets import TicketOffice
from pdserve.v1 import node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Serves Attach, Drain and GetState over one desk, once `open_for_work` was called. Who has not proven `secret` learns
    nothing, not even that.
    """

    def __init__(self, settings: StreamSettings, secret: ClusterSecret | None, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self._greetings = Greetings(secret, settings.lease_s)
        self._tickets = TicketOffice(secret, clock)
        self._strangers = Strangers(clock)
        self.legs = Legs(clock, self._on_output)
        self._streams: dict[Incarnation, RouterStream] = {}
        self._peers = NamedPeers()
        self._desk: Desk | None = None
        self._process: ProcessInfo | None = None
        self._process_gauges: Callable[[], dict[str, float]] = dict
        self._draining = False
        self._num_unusable = 0

    def open_for_work(self, desk: Desk, process: ProcessInfo, process_gauges: Callable[[], dict[str, float]]) -> None:
        """Accept routers from now on."""
        self._desk, self._process, self._process_gauges = desk, process, process_gauges

    def load_changed(self) -> None:
        """Tell every router the new load soon."""
        for stream in self._streams.values():
            stream.load_changed()

    async def Attach(  # type: ignore[override]  # noqa: N802 - a coroutine that writes; the stubs know generators only
        self, request_iterator: AsyncIterator[node_pb2.AttachRequest], context: Context
    ) -> None:
        """Serve one router's stream until it ends."""
        try:
            hello = await self._greetings.greet(request_iterator, context.write)
            desk, process = self._opened()
            stream = self._register(hello, desk)
        except PdserveError as error:
            await self._refuse(context, error)
        fields = {"peer": stream.router.hex()[:8]}
        logger.info("a router attached", extra=fields)
        tasks: list[asyncio.Task[None]] = []
        try:
            await context.write(node_pb2.AttachResponse(hello=self._node_hello(desk, process)))
            parts = (stream.watch(), stream.read(request_iterator), stream.write(context.write))
            tasks += [asyncio.create_task(part) for part in parts]
            for task in tasks:
                task.add_done_callback(lambda task: stream.close(_why_it_ended(task)))
            await stream.wait_closed()
        finally:
            stream.close("the stream broke")
            self._unregister(stream, desk)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            logger.info("a router left: %s", stream.close_reason, extra=fields)

    async def Prove(  # noqa: N802 - the contract's name
        self, request: node_pb2.ProveRequest, context: Context
    ) -> node_pb2.ProveResponse:
        """Prove the cluster secret to a caller of Drain or GetState."""
        try:
            return self._tickets.issue(request, context.peer())
        except PdserveError as error:
            await self._refuse(context, error)

    async def Drain(  # noqa: N802 - the contract's name
        self, request: node_pb2.DrainRequest, context: Context
    ) -> node_pb2.DrainResponse:
        """Refuse new work, wait for the rest until the deadline, then hand it back."""
        try:
            self._checked(context, "Drain")
        except PdserveError as error:
            await self._refuse(context, error)
        before = self.legs.num_finished
        num_handed_back = await self.drain(request.deadline_s)
        return node_pb2.DrainResponse(num_finished=self.legs.num_finished - before, num_handed_back=num_handed_back)

    async def GetState(  # noqa: N802 - the contract's name
        self,
        request: node_pb2.GetStateRequest,  # noqa: ARG002 - it has no parameters
        context: Context,
    ) -> node_pb2.GetStateResponse:
        """Return the debug dump."""
        try:
            desk, process = self._checked(context, "GetState")
        except PdserveError as error:
            await self._refuse(context, error)
        return node_pb2.GetStateResponse(
            process=process_to_pb(process),
            gauges=self.gauges(),
            machines_json=json.dumps(self._machines(desk), default=str),
            violations=desk.check_invariants(),
        )

    def state(self) -> dict[str, object]:
        """Return the debug dump as JSON values; only gauges while the model is loaded."""
        desk, process = self._desk, self._process
        if desk is None or process is None:
            return {"gauges": self.gauges()}
        return {
            "process": process_as_json(process),
            "gauges": self.gauges(),
            "machines": json.loads(json.dumps(self._machines(desk), default=str)),
            "violations": desk.check_invariants(),
        }

    def gauges(self) -> dict[str, float]:
        """Return every gauge of the node by name."""
        role = {} if self._desk is None else self._desk.gauges()
        return {
            "routers": float(len(self._streams)),
            "legs": float(self.legs.num_open),
            "greetings": float(self._greetings.num_open),
            "unproven_total": float(self._strangers.num_refused),
            "peer_conflicts": float(self._peers.num_conflicts),
            "outbox_bytes": float(self.legs.pending_bytes()),
            "draining": float(self._draining),
            "unusable_messages_total": float(
                self._num_unusable + sum(stream.num_unusable for stream in self._streams.values())
            ),
            **role,
            **self._process_gauges(),
        }

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self._draining

    async def drain(self, deadline_s: float) -> int:
        """Refuse new work and wait until every leg is released; past the deadline hand the rest back, and count those."""
        self._draining = True
        self.load_changed()
        await self.legs.wait_all_released(deadline_s)
        if self._desk is None:
            return 0
        late = self.legs.open_keys()
        for key in late:
            self._desk.drain(key)
        await self.legs.wait_all_released(self._settings.lease_s)
        for stream in list(self._streams.values()):
            await stream.wait_all_sent(self._settings.lease_s)
        return len(late)

    def _machines(self, desk: Desk) -> dict[str, object]:
        return {"legs": self.legs.describe(), **desk.describe()}

    def close_streams(self, reason: str) -> None:
        """End every router's stream."""
        for stream in list(self._streams.values()):
            stream.close(reason)

    def _checked(self, context: Context, method: str) -> tuple[Desk, ProcessInfo]:
        # The stubs know metadata as objects with two attributes; they are pairs.
        metadata = cast("Iterable[tuple[str, str | bytes]]", context.invocation_metadata() or ())
        self._tickets.check(metadata, method, context.peer())
        return self._opened()

    def _opened(self) -> tuple[Desk, ProcessInfo]:
        if self._desk is None or self._process is None:
            raise NoNodes("the node is loading its model", retry_after_s=0.5)
        return self._desk, self._process

    async def _refuse(self, context: Context, error: PdserveError) -> NoReturn:
        if isinstance(error, Unauthenticated):
            self._strangers.refused(context.peer(), error.message)
        await abort_with(context, error)

    def _register(self, hello: node_pb2.RouterHello, desk: Desk) -> RouterStream:
        router = Incarnation(hello.incarnation)
        older = self._streams.get(router)
        if older is not None:
            if hello.stream_number <= older.number:
                raise InvalidRequest("a newer stream of this router is attached", field="hello.stream_number")
            older.close("superseded by a newer stream")
            self._unregister(older, desk)
        stream = RouterStream(
            hello, desk, self.legs, self._settings, self._clock, lambda: self._draining, self._on_peers
        )
        self._streams[router] = stream
        return stream

    def _unregister(self, stream: RouterStream, desk: Desk) -> None:
        """Free what the router owned; once per stream."""
        if self._streams.get(stream.router) is not stream:
            return
        del self._streams[stream.router]
        self._num_unusable += stream.num_unusable
        for key in self.legs.detach(stream.router):
            desk.cancel(key, f"router lost: {stream.close_reason}")
        self._on_peers(stream.router, ())

    def _on_output(self, router: Incarnation) -> None:
        stream = self._streams.get(router)
        if stream is not None:
            stream.notify()

    def _on_peers(self, router: Incarnation, peers: tuple[Peer, ...]) -> None:
        united = self._peers.name(router, peers)
        if self._desk is not None:
            self._desk.set_peers(united)

    def _node_hello(self, desk: Desk, process: ProcessInfo) -> node_pb2.NodeHello:
        facts = desk.facts()
        endpoints = [node_pb2.KvEndpoint(address=facts.kv_address)] if facts.kv_address else []
        return node_pb2.NodeHello(
            process=process_to_pb(process),
            identity=pb.identity_to_pb(facts.identity),
            capabilities=pb.capabilities_to_pb(facts.capabilities),
            kv_endpoints=endpoints,
            num_blocks=facts.num_blocks,
            max_model_len=facts.max_model_len,
            lease_s=self._settings.lease_s,
            eos_token_ids=sorted(facts.eos_token_ids),
        )


def _why_it_ended(task: "asyncio.Task[None]") -> str:
    if task.cancelled():
        return "the stream broke"
    error = task.exception()
    if error is None:
        return "the router closed the stream"
    if not isinstance(error, grpc.RpcError | grpc.aio.BaseError | asyncio.InvalidStateError):
        logger.error("a router's stream failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
