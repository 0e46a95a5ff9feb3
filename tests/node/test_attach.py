"""The Attach stream over real gRPC: hello, lease, supersession, unusable messages, drain."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.clock import SystemClock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.ids import Incarnation
from pdserve.core.work import SampledToken
from pdserve.node.attach import StreamSettings
from pdserve.node.service import NodeServicer
from pdserve.rpc.options import channel_options
from pdserve.v1 import node_pb2, node_pb2_grpc
from tests.node.greeter import DEADLINE_S, Call, greet, read
from tests.node.scripted_desk import ScriptedDesk
from tests.node.works import DECODE, PREFILL, leg

pytestmark = pytest.mark.asyncio


@dataclass
class Node:
    """A served NodeServicer and a channel to it."""

    servicer: NodeServicer
    desk: ScriptedDesk
    channel: grpc.aio.Channel

    async def attach(self, number: int = 1, secret: ClusterSecret | None = None) -> Call:
        """Open a stream, say hello, prove the secret, and read the node's hello."""
        call = node_pb2_grpc.NodeServiceStub(self.channel).Attach()
        await greet(call, secret, number=number)
        return call


@asynccontextmanager
async def served(
    *, lease_s: float = 10.0, max_waiting: int = 4, secret: ClusterSecret | None = None, is_loaded: bool = True
) -> AsyncIterator[Node]:
    servicer = NodeServicer(StreamSettings(lease_s, lease_s / 6, max_waiting), secret, SystemClock())
    desk = ScriptedDesk(servicer.legs)
    process = ProcessInfo(Role.PREFILL, Incarnation(PREFILL), "0", "test")
    if is_loaded:
        servicer.open_for_work(desk, process, dict)
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            yield Node(servicer, desk, channel)
    finally:
        await server.stop(0)


async def read_events(call: Call, number: int) -> list[node_pb2.LegEvent]:
    """Return the next `number` leg events, passing over status and beats."""
    events: list[node_pb2.LegEvent] = []
    while len(events) < number:
        events += (await read(call)).step.events
    return events


async def until_ended(call: Call) -> None:
    """Read until the node ends the stream."""
    async with asyncio.timeout(DEADLINE_S):
        while isinstance(await call.read(), node_pb2.AttachResponse):
            pass


def submit(session_id: int, attempt: int = 1, **changes: object) -> node_pb2.AttachRequest:
    message = node_pb2.Submit(
        session_id=session_id,
        attempt=attempt,
        transfer_id=b"T" * 16,
        prefill_incarnation=PREFILL,
        decode_incarnation=DECODE,
        num_prompt_ids=3,
        prompt_ids=[5, 6, 7],
        max_tokens=4,
        sampling=node_pb2.NodeSampling(top_p=1.0),
    )
    message.MergeFrom(node_pb2.Submit(**changes))  # type: ignore[arg-type] # test rows of many types
    return node_pb2.AttachRequest(submit=message)


async def test_a_submit_reaches_the_desk_and_a_cancel_too() -> None:
    async with served() as node:
        call = await node.attach()
        await call.write(submit(1))
        await call.write(node_pb2.AttachRequest(cancel=node_pb2.Cancel(session_id=1, attempt=1, reason="client")))
        kinds = [event.WhichOneof("event") for event in await read_events(call, 2)]
        assert kinds == ["ended", "released"]
        assert [work.leg for work in node.desk.submitted] == [leg(1)]
        assert node.desk.cancelled == [(leg(1), "client")]


async def test_a_cancel_of_some_sequences_leaves_the_leg_open() -> None:
    async with served() as node:
        call = await node.attach()
        await call.write(submit(1, num_sequences=4))
        await call.write(node_pb2.AttachRequest(cancel=node_pb2.Cancel(session_id=1, attempt=1, sequences=[1, 3])))
        await call.write(node_pb2.AttachRequest(cancel=node_pb2.Cancel(session_id=9, attempt=1, sequences=[0])))
        [unknown] = await read_events(call, 1)
        assert (unknown.session_id, unknown.WhichOneof("event")) == (9, "released")
        assert node.desk.cancelled_sequences == [(leg(1), frozenset({1, 3}), "cancelled")]
        assert node.desk.cancelled == []
        assert node.servicer.legs.is_open(leg(1))


async def test_hello_must_come_first() -> None:
    async with served() as node:
        call = node_pb2_grpc.NodeServiceStub(node.channel).Attach()
        await call.write(submit(1))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_newer_stream_supersedes_and_an_older_is_refused() -> None:
    async with served() as node:
        older = await node.attach(5)
        await older.write(submit(1))
        await read_status_until(older)
        newer = await node.attach(6)
        await until_ended(older)
        assert [key for key, _ in node.desk.cancelled] == [leg(1)]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await node.attach(5)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await newer.write(node_pb2.AttachRequest(beat=node_pb2.Beat()))
        await read(newer)


async def read_status_until(call: Call) -> None:
    """Return once a status shows that the node works through what was written."""
    while (await read(call)).WhichOneof("message") != "status":
        pass


async def test_a_silent_router_loses_its_lease_and_its_legs() -> None:
    async with served(lease_s=0.3) as node:
        call = await node.attach()
        await call.write(submit(1))
        await until_ended(call)
        [(key, reason)] = node.desk.cancelled
        assert key == leg(1)
        assert "silent" in reason
        assert node.servicer.gauges()["routers"] == 0
        assert node.servicer.gauges()["legs"] == 0


async def test_a_router_that_does_not_read_loses_its_lease() -> None:
    """Nothing blocks the node: the outbox merges, and a write blocked for longer than the lease ends the stream."""
    async with served(lease_s=0.5) as node:
        call = await node.attach()
        await call.write(submit(1, max_tokens=10**9))
        lost = asyncio.Event()
        node.desk.cancelled = Watched(lost)
        legs, index = node.servicer.legs, 0
        async with asyncio.timeout(DEADLINE_S):
            [stream] = node.servicer._streams.values()
            while not lost.is_set():
                stream._heard_s = float("inf")  # it beats, and on a busy machine too
                while legs.is_open(leg(1)) and legs.pending_bytes() < 1_000_000:
                    legs.token(leg(1), large_token(index))
                    index += 1
                await asyncio.sleep(0)
        assert "does not read" in node.desk.cancelled[0][1]


class Watched(list):  # type: ignore[type-arg] # a list of whatever the desk writes down
    """A list that tells when something was added."""

    def __init__(self, added: asyncio.Event) -> None:
        super().__init__()
        self._added = added

    def append(self, item: object) -> None:
        super().append(item)
        self._added.set()


def large_token(index: int) -> SampledToken:
    """A token of 10 KB: the socket takes megabytes before it blocks."""
    return SampledToken(index, 7, -0.5, top=tuple((token_id, -1.0) for token_id in range(1000)))


async def test_a_long_prompt_comes_in_parts() -> None:
    async with served() as node:
        call = await node.attach()
        await call.write(submit(1, num_prompt_ids=7))
        for ids in ([8, 9], [10, 11]):
            part = node_pb2.SubmitPart(session_id=1, attempt=1, prompt_ids=ids)
            await call.write(node_pb2.AttachRequest(submit_part=part))
        await call.write(submit(2))
        async with asyncio.timeout(DEADLINE_S):
            while len(node.desk.submitted) < 2:
                await read(call)
        assert [work.prompt_ids for work in node.desk.submitted] == [(5, 6, 7, 8, 9, 10, 11), (5, 6, 7)]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0, "output_ids": [1] * 4},
        {"transfer_id": b"short"},
        {"sampling": node_pb2.NodeSampling(top_p=float("nan"))},
        {"sampling": node_pb2.NodeSampling(temperature=-1.0)},
    ],
    ids=["max_tokens", "transfer_id", "nan", "negative"],
)
async def test_an_unusable_submit_fails_its_request_never_the_stream(changes: dict[str, object]) -> None:
    async with served() as node:
        call = await node.attach()
        await call.write(submit(1, 1, **changes))
        ended, released = await read_events(call, 2)
        assert (ended.ended.outcome, ended.ended.reason) == (node_pb2.LEG_OUTCOME_REFUSED, "unusable_submit")
        assert ended.ended.detail
        assert released.WhichOneof("event") == "released"
        await call.write(submit(2))
        await call.write(node_pb2.AttachRequest(cancel=node_pb2.Cancel(session_id=2, attempt=1)))
        assert [event.session_id for event in await read_events(call, 2)] == [2, 2]
        assert [work.leg for work in node.desk.submitted] == [leg(2)]


async def test_a_full_queue_answers_busy() -> None:
    async with served(max_waiting=4) as node:
        node.desk.num_waiting = 4
        call = await node.attach()
        await call.write(submit(1))
        ended, _ = await read_events(call, 2)
        assert (ended.ended.outcome, ended.ended.reason) == (node_pb2.LEG_OUTCOME_BUSY, "queue_full")


async def test_a_newer_attempt_cancels_the_older_on_the_same_node() -> None:
    async with served() as node:
        call = await node.attach()
        await call.write(submit(1, 1))
        await call.write(submit(1, 2))
        await read_events(call, 2)
        async with asyncio.timeout(DEADLINE_S):
            while len(node.desk.submitted) < 2:
                await read(call)
        assert [key for key, _ in node.desk.cancelled] == [leg(1, 1)]


async def test_drain_refuses_new_work_and_hands_the_rest_back() -> None:
    async with served() as node:
        call = await node.attach()
        await call.write(submit(1))
        await read_status_until(call)
        stub = node_pb2_grpc.NodeServiceStub(node.channel)
        done = await stub.Drain(node_pb2.DrainRequest(deadline_s=0.1))
        assert (done.num_finished, done.num_handed_back) == (0, 1)
        assert node.desk.drained == [leg(1)]
        await call.write(submit(2))
        events = await read_events(call, 4)
        outcomes = [event.ended.outcome for event in events if event.WhichOneof("event") == "ended"]
        assert outcomes == [node_pb2.LEG_OUTCOME_DRAINED] * 2
