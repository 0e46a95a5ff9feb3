"""The first messages of an Attach stream, on the router's side: only a hello goes out before the node proved the secret."""

import asyncio
from dataclasses import dataclass

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.ids import Incarnation
from pdserve.router import pb_nodes
from pdserve.router.attach_call import AttachCall, StreamEnded
from pdserve.router.nodes import NodeState
from pdserve.rpc.secret import ATTACH_NODE, ATTACH_ROUTER, NONCE_BYTES, fresh_nonce, proof, proven_with, stream_parts
from pdserve.v1 import node_pb2

STRANGER = "or another process listens at this address"


@dataclass(frozen=True, slots=True)
class Greeting:
    """One stream's greeting. `step_s` is the longest wait for each of the node's messages."""

    incarnation: Incarnation
    stream_number: int
    lease_s: float
    secret: ClusterSecret | None
    step_s: float

    async def exchange(self, call: AttachCall) -> node_pb2.NodeHello:
        """Return the node's hello, once both sides have proven the secret. Raises StreamEnded if the node cannot be used."""
        nonce = b"" if self.secret is None else fresh_nonce()
        hello = pb_nodes.hello_message(self.incarnation, self.stream_number, self.lease_s, nonce)
        answer = await self._ask(call, hello)
        if answer.WhichOneof("message") != "challenge":
            raise StreamEnded(NodeState.REFUSED, f"the first message was no challenge: another version, {STRANGER}")
        answer = await self._ask(call, self._proof(nonce, answer.challenge))
        if answer.WhichOneof("message") != "hello":
            raise StreamEnded(NodeState.REFUSED, "the message after the challenge was no hello")
        return answer.hello

    def _proof(self, nonce: bytes, challenge: node_pb2.NodeChallenge) -> node_pb2.AttachRequest | None:
        """Check the node's proof, and return the router's; None where neither side has a secret."""
        is_empty = not challenge.nonce and not challenge.proof
        if self.secret is None:
            if not is_empty:
                raise StreamEnded(NodeState.REFUSED, "it asks for the cluster secret, and this router has none")
            return None
        if is_empty:
            raise StreamEnded(NodeState.REFUSED, f"it has no cluster secret, {STRANGER}")
        parts = stream_parts(nonce, challenge.nonce, self.incarnation, self.stream_number)
        value = proven_with(challenge.proof, self.secret, ATTACH_NODE, *parts)
        if value is None or len(challenge.nonce) != NONCE_BYTES:
            raise StreamEnded(
                NodeState.REFUSED, f"it does not prove the cluster secret: its secret differs, {STRANGER}"
            )
        return pb_nodes.proof_message(proof(value, ATTACH_ROUTER, *parts))

    async def _ask(self, call: AttachCall, message: node_pb2.AttachRequest | None) -> node_pb2.AttachResponse:
        try:
            async with asyncio.timeout(self.step_s):
                if message is not None:
                    await call.write(message)
                return await call.read()
        except TimeoutError:
            raise StreamEnded(NodeState.DOWN, "no hello in time") from None
