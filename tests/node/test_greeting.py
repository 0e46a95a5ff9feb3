"""Who may attach: a router that proves the secret. A stranger learns nothing, and costs a place among few."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.node.greeting import MAX_GREETING
from pdserve.node.pb import Peer
from pdserve.rpc.secret import ATTACH_ROUTER, fresh_nonce, proof, stream_parts
from pdserve.rpc.tickets import ticket_metadata
from pdserve.v1 import node_pb2, node_pb2_grpc
from tests.node.greeter import DEADLINE_S, Call, greet, read, say_hello
from tests.node.test_attach import Node, served, submit
from tests.node.works import DECODE, ROUTER

pytestmark = pytest.mark.asyncio

OLD, NEW = b"the old secret of the test", b"the new secret of the test"


def attach(node: Node) -> Call:
    return node_pb2_grpc.NodeServiceStub(node.channel).Attach()


async def send_proof(call: Call, raw: bytes) -> None:
    await call.write(node_pb2.AttachRequest(proof=node_pb2.RouterProof(proof=raw)))


async def error_of(call: Call) -> grpc.aio.AioRpcError:
    """Read until the node ends the stream with an error, and return that; fail on any word about the node."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(DEADLINE_S):
            while isinstance(message := await call.read(), node_pb2.AttachResponse):
                assert message.WhichOneof("message") == "challenge", message
    return raised.value


async def wrong_secret(call: Call) -> None:
    challenge = await say_hello(call, b"n" * 32)
    await send_proof(call, proof(NEW, ATTACH_ROUTER, *stream_parts(b"n" * 32, challenge.nonce, ROUTER, 1)))


async def no_secret(call: Call) -> None:
    await call.write(node_pb2.AttachRequest(hello=node_pb2.RouterHello(incarnation=ROUTER, stream_number=1)))


async def reflected(call: Call) -> None:
    await send_proof(call, (await say_hello(call, b"n" * 32)).proof)


async def nonce_as_proof(call: Call) -> None:
    await send_proof(call, (await say_hello(call, b"n" * 32)).nonce)


async def empty_proof(call: Call) -> None:
    await say_hello(call, b"n" * 32)
    await send_proof(call, b"")


async def work_in_place_of_a_proof(call: Call) -> None:
    await say_hello(call, b"n" * 32)
    await call.write(submit(1))


async def work_at_once(call: Call) -> None:
    await call.write(submit(1))


async def for_another_stream(call: Call) -> None:
    challenge = await say_hello(call, b"n" * 32, number=2)
    await send_proof(call, proof(OLD, ATTACH_ROUTER, *stream_parts(b"n" * 32, challenge.nonce, ROUTER, 1)))


async def for_another_router(call: Call) -> None:
    challenge = await say_hello(call, b"n" * 32, router=b"X" * 16)
    await send_proof(call, proof(OLD, ATTACH_ROUTER, *stream_parts(b"n" * 32, challenge.nonce, ROUTER, 1)))


async def leaves(call: Call) -> None:
    await say_hello(call, b"n" * 32)
    await call.done_writing()


STRANGERS: list[Callable[[Call], Awaitable[None]]] = [
    *(wrong_secret, no_secret, reflected, nonce_as_proof, empty_proof, work_in_place_of_a_proof, work_at_once),
    *(for_another_stream, for_another_router, leaves),
]


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "loading"])
@pytest.mark.parametrize("greeting", STRANGERS, ids=lambda greeting: greeting.__name__)
async def test_a_stranger_is_refused_and_learns_nothing(
    greeting: Callable[[Call], Awaitable[None]], is_loaded: bool
) -> None:
    async with served(secret=ClusterSecret(OLD), is_loaded=is_loaded) as node:
        call = attach(node)
        await greeting(call)
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "--cluster-secret-file" in str(error.trailing_metadata())
        gauges = node.servicer.gauges()
        assert (gauges["routers"], gauges["legs"], gauges["greetings"], gauges["unproven_total"]) == (0, 0, 0, 1)
        assert not node.desk.submitted


async def test_a_recorded_greeting_is_of_no_use_again() -> None:
    async with served(secret=ClusterSecret(OLD)) as node:
        first, nonce = attach(node), fresh_nonce()
        challenge = await say_hello(first, nonce)
        recorded = proof(OLD, ATTACH_ROUTER, *stream_parts(nonce, challenge.nonce, ROUTER, 1))
        await send_proof(first, recorded)
        assert (await read(first)).WhichOneof("message") == "hello"
        again = attach(node)
        assert (await say_hello(again, nonce)).nonce != challenge.nonce
        await send_proof(again, recorded)
        assert (await error_of(again)).code() is grpc.StatusCode.UNAUTHENTICATED
        assert node.servicer.gauges()["routers"] == 1


@pytest.mark.parametrize("ours", [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)], ids=["old", "old-new", "new-old", "new"])
@pytest.mark.parametrize("theirs", [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)], ids=["old", "old-new", "new-old", "new"])
async def test_processes_that_are_one_step_of_a_change_apart_understand_each_other(
    ours: tuple[bytes, ...], theirs: tuple[bytes, ...]
) -> None:
    steps = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    async with served(secret=ClusterSecret(*theirs)) as node:
        if abs(steps.index(ours) - steps.index(theirs)) <= 1:
            await greet(attach(node), ClusterSecret(*ours))
            stub = node_pb2_grpc.NodeServiceStub(node.channel)
            ticket = await ticket_metadata(stub, ClusterSecret(*ours), "GetState", DEADLINE_S)
            await stub.GetState(node_pb2.GetStateRequest(), metadata=ticket)
        elif theirs[0] not in ours:
            with pytest.raises(AssertionError, match="does not prove"):
                await greet(attach(node), ClusterSecret(*ours))


async def test_a_stream_stays_when_the_secret_is_changed_and_a_new_one_proves_the_new() -> None:
    secret = ClusterSecret(OLD)
    async with served(secret=secret) as node:
        standing = attach(node)
        await greet(standing, ClusterSecret(OLD))
        secret.replace(NEW)
        await standing.write(submit(1))
        await standing.write(node_pb2.AttachRequest(cancel=node_pb2.Cancel(session_id=1, attempt=1)))
        async with asyncio.timeout(DEADLINE_S):
            while not (await read(standing)).step.events:
                pass
        await greet(attach(node), ClusterSecret(NEW), router=b"X" * 16)
        with pytest.raises(AssertionError, match="does not prove"):
            await greet(attach(node), ClusterSecret(OLD), router=b"Y" * 16)
        assert node.servicer.gauges()["routers"] == 2


async def test_greetings_are_bounded_and_the_oldest_makes_room() -> None:
    async with served(lease_s=300.0, secret=ClusterSecret(OLD)) as node:
        halves = []
        for _ in range(MAX_GREETING + 8):
            halves.append(attach(node))
            await say_hello(halves[-1], fresh_nonce())
        assert node.servicer.gauges()["greetings"] == MAX_GREETING
        codes = [(await error_of(call)).code() for call in halves[:8]]
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 8
        await greet(attach(node), ClusterSecret(OLD), lease_s=300.0)
        gauges = node.servicer.gauges()
        assert (gauges["routers"], gauges["greetings"], gauges["outbox_bytes"]) == (1, MAX_GREETING - 1, 0)
        for call in halves:
            call.cancel()

        async with asyncio.timeout(DEADLINE_S):
            while node.servicer.gauges()["greetings"]:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_heard", [True, False], ids=["after hello", "at once"])
async def test_each_step_of_a_greeting_has_a_deadline(is_heard: bool) -> None:
    async with served(lease_s=0.3, secret=ClusterSecret(OLD)) as node:
        call = attach(node)
        if is_heard:
            await say_hello(call, fresh_nonce())
        assert (await error_of(call)).code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["GetState", "Drain"])
async def test_single_calls_ask_for_a_ticket(method: str) -> None:
    secret = ClusterSecret(OLD)
    async with served(secret=secret) as node:
        stub = node_pb2_grpc.NodeServiceStub(node.channel)
        other = {"GetState": "Drain", "Drain": "GetState"}[method]
        call = getattr(stub, method)
        request = node_pb2.GetStateRequest() if method == "GetState" else node_pb2.DrainRequest(deadline_s=0.1)
        used = await ticket_metadata(stub, secret, method, DEADLINE_S)
        await call(request, metadata=used)
        for bad in ((), used, await ticket_metadata(stub, secret, other, DEADLINE_S)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(request, metadata=bad)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_node_without_a_secret_takes_a_router_without_one() -> None:
    async with served() as node:
        assert await say_hello(attach(node), b"") == node_pb2.NodeChallenge()
        assert await say_hello(attach(node), fresh_nonce(), 2) == node_pb2.NodeChallenge()


async def test_a_second_router_cannot_turn_a_nodes_kv_away() -> None:
    """On the stream too: what the desk is told, and the gauge."""
    async with served() as node:
        for number, address in enumerate(("tcp://127.0.0.1:1", "tcp://127.0.0.1:666"), 1):
            call = attach(node)
            await greet(call, router=bytes([number]) * 16, lease_s=300.0)
            peer = node_pb2.Peer(incarnation=DECODE, kv_endpoints=[node_pb2.KvEndpoint(address=address)])
            await call.write(node_pb2.AttachRequest(peers=node_pb2.Peers(nodes=[peer])))
            async with asyncio.timeout(DEADLINE_S):
                while node.servicer.gauges()["peer_conflicts"] < number - 1 or not node.desk.peers:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        assert node.desk.peers == (Peer(DECODE, "tcp://127.0.0.1:1"),)
