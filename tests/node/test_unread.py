"""A router that does not read its stream: the node leaves it within its lease, on the wire too."""

import asyncio

import pytest

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.clock import SystemClock
from pdserve.core.ids import Incarnation
from pdserve.core.work import SampledToken
from pdserve.node.attach import StreamSettings
from pdserve.node.service import NodeServicer
from pdserve.rpc.server import GrpcServer
from pdserve.v1 import node_pb2, node_pb2_grpc
from tests.node.scripted_desk import ScriptedDesk
from tests.node.test_attach import submit
from tests.node.works import PREFILL, ROUTER, leg
from tests.rpc.wire import DEADLINE_S, connect

LEASE_S = 1.0


@pytest.mark.asyncio
@pytest.mark.parametrize("window", [0, 2000], ids=["not even the hello", "nothing after the hello"])
async def test_a_router_that_does_not_read_is_left_at_the_transport(window: int) -> None:
    """The stream's end stood behind the message that was not read: the call stayed open, and the message in memory."""
    servicer = NodeServicer(StreamSettings(LEASE_S, LEASE_S / 6, 4), None, SystemClock())
    desk = ScriptedDesk(servicer.legs)
    servicer.open_for_work(desk, ProcessInfo(Role.PREFILL, Incarnation(PREFILL), "0", "test"), dict)
    server = GrpcServer("127.0.0.1", 0, unread_s=LEASE_S)
    server.add("NodeService", lambda target: node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, target))
    await server.start()
    async with connect(server.port, window) as wire:
        number = wire.open("/pdserve.v1.NodeService/Attach")
        stream = wire.streams[number]
        hello = node_pb2.RouterHello(incarnation=ROUTER, stream_number=1, lease_s=1)
        wire.send(number, node_pb2.AttachRequest(hello=hello).SerializeToString(), is_last=False)
        await wire.until(lambda: bool(stream.headers))
        if window:
            wire.send(number, submit(1, max_tokens=10_000).SerializeToString(), is_last=False)
            async with asyncio.timeout(DEADLINE_S):
                while not servicer.legs.is_open(leg(1)):  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.01)
            for index in range(5000):
                servicer.legs.token(leg(1), SampledToken(index, 3, -0.5))
        await wire.until(lambda: stream.is_ended and stream.is_reset)
        assert len(stream.data) <= window
        assert servicer.gauges()["routers"] == servicer.gauges()["legs"] == 0
    await server.stop(0)
