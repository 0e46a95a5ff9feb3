"""A router's side of a stream's greeting, message by message, so that a test can say what an honest router would not."""

import asyncio

import grpc

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.rpc.secret import ATTACH_NODE, ATTACH_ROUTER, fresh_nonce, proof, proven_with, stream_parts
from pdserve.v1 import node_pb2
from tests.node.works import ROUTER

DEADLINE_S = 20.0
Call = grpc.aio.StreamStreamCall[node_pb2.AttachRequest, node_pb2.AttachResponse]


async def read(call: Call) -> node_pb2.AttachResponse:
    """Return the next message; fail if the stream has ended."""
    message = await asyncio.wait_for(call.read(), DEADLINE_S)
    assert isinstance(message, node_pb2.AttachResponse), "the stream has ended"
    return message


async def say_hello(
    call: Call, nonce: bytes, number: int = 1, router: bytes = ROUTER, lease_s: float = 1.0
) -> node_pb2.NodeChallenge:
    """Say hello and return the node's challenge."""
    hello = node_pb2.RouterHello(incarnation=router, stream_number=number, lease_s=lease_s, nonce=nonce)
    await call.write(node_pb2.AttachRequest(hello=hello))
    answer = await read(call)
    assert answer.WhichOneof("message") == "challenge"
    return answer.challenge


async def greet(
    call: Call, secret: ClusterSecret | None = None, *, number: int = 1, router: bytes = ROUTER, lease_s: float = 1.0
) -> node_pb2.NodeHello:
    """Greet as an honest router does, and return the node's hello."""
    nonce = b"" if secret is None else fresh_nonce()
    challenge = await say_hello(call, nonce, number, router, lease_s)
    if secret is not None:
        parts = stream_parts(nonce, challenge.nonce, router, number)
        value = proven_with(challenge.proof, secret, ATTACH_NODE, *parts)
        assert value is not None, "the node does not prove the secret"
        given = node_pb2.RouterProof(proof=proof(value, ATTACH_ROUTER, *parts))
        await call.write(node_pb2.AttachRequest(proof=given))
    answer = await read(call)
    assert answer.WhichOneof("message") == "hello"
    return answer.hello
