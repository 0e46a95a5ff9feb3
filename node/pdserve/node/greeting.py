"""The first messages of an Attach stream: node and router prove the cluster secret to each other, before anything else is said.

A stream that greets owns nothing: no legs, no outbox, no word of this node. Its number and each of its steps are bounded.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf.message import DecodeError

from pdserve.core.clock import Clock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import InvalidRequest, Overloaded, PdserveError
from pdserve.core.ids import ID_BYTES
from pdserve.rpc.secret import (
    ATTACH_NODE,
    ATTACH_ROUTER,
    NONCE_BYTES,
    fresh_nonce,
    is_proof,
    proof,
    stream_parts,
    unproven,
)
from pdserve.v1 import node_pb2

MAX_GREETING = 64
"""Streams that may greet at once; the oldest makes room. An honest router is done within a round trip."""
TELL_EVERY_S = 10.0

Requests = AsyncIterator[node_pb2.AttachRequest]
Send = Callable[[node_pb2.AttachResponse], Awaitable[None]]

logger = logging.getLogger(__name__)


class Greetings:
    """Lets routers in that prove the secret. Without a secret (loopback) a hello is enough."""

    def __init__(self, secret: ClusterSecret | None, step_s: float) -> None:
        self._secret, self._step_s = secret, step_s
        self._open: dict[object, asyncio.Timeout] = {}

    @property
    def num_open(self) -> int:
        """Streams that greet now."""
        return len(self._open)

    async def greet(self, requests: Requests, send: Send) -> node_pb2.RouterHello:
        """Return the router's hello once it has proven the secret.

        Raises Unauthenticated, InvalidRequest without a secret, and Overloaded if the stream had to make room.
        """
        while len(self._open) >= MAX_GREETING:
            oldest = next(iter(self._open))
            self._open.pop(oldest).reschedule(asyncio.get_running_loop().time())
        key = object()
        try:
            # No deadline of its own: each step has one. This one is for making room.
            async with asyncio.timeout(None) as room:
                self._open[key] = room
                return await self._exchange(requests, send)
        except TimeoutError:
            raise Overloaded("too many streams greet at once", hint="come back", retry_after_s=self._step_s) from None
        finally:
            self._open.pop(key, None)

    async def _exchange(self, requests: Requests, send: Send) -> node_pb2.RouterHello:
        hello = (await self._next(requests, "hello")).hello
        if len(hello.incarnation) != ID_BYTES:
            raise self._unusable("hello")
        if self._secret is None:
            await self._send(send, node_pb2.NodeChallenge())
            return hello
        if len(hello.nonce) != NONCE_BYTES:
            raise unproven("this node has a cluster secret, and the router has none")
        nonce, value = fresh_nonce(), self._secret.proving
        parts = stream_parts(hello.nonce, nonce, hello.incarnation, hello.stream_number)
        await self._send(send, node_pb2.NodeChallenge(nonce=nonce, proof=proof(value, ATTACH_NODE, *parts)))
        given = (await self._next(requests, "proof")).proof.proof
        if not is_proof(given, value, ATTACH_ROUTER, *parts):
            raise unproven("the router does not prove the cluster secret")
        return hello

    async def _next(self, requests: Requests, kind: str) -> node_pb2.AttachRequest:
        try:
            message = await asyncio.wait_for(anext(requests), self._step_s)
        except (TimeoutError, StopAsyncIteration, DecodeError):
            raise self._unusable(kind) from None
        if message.WhichOneof("message") != kind:
            raise self._unusable(kind)
        return message

    async def _send(self, send: Send, challenge: node_pb2.NodeChallenge) -> None:
        try:
            await asyncio.wait_for(send(node_pb2.AttachResponse(challenge=challenge)), self._step_s)
        except TimeoutError:
            raise self._unusable("proof") from None

    def _unusable(self, kind: str) -> PdserveError:
        """Return the error for a message that did not come, or is not what it should be."""
        if self._secret is not None:
            return unproven(f"the stream begins with a proof of the cluster secret, and no usable {kind} came")
        return InvalidRequest("the stream's first message must be hello, with an incarnation", field="hello")


class Strangers:
    """Counts what was refused for want of a proof, and tells of it now and then: who floods the door does not flood the log."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_s = float("-inf")
        self._num_untold = 0
        self.num_refused = 0

    def refused(self, peer: str, why: str) -> None:
        """Take note of one."""
        self.num_refused += 1
        self._num_untold += 1
        now_s = self._clock.now_s()
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            logger.warning("refused %d times since last told: %s", self._num_untold, why, extra={"peer": peer})
            self._num_untold = 0
