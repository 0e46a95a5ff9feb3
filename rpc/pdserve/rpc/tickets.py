"""Tickets for single calls to a node under a cluster secret: the node proves the secret, then the caller does, for one call.

The caller asks Prove on the connection that the call will take. It checks the node's proof before it sends anything but a nonce,
and makes a ticket over the node's nonce: good for one call of one method, once, within `TICKET_S`, and on that connection only.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.core.clock import Clock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.rpc.secret import CALL_NODE, CALL_TICKET, NONCE_BYTES, fresh_nonce, is_proof, proof, proven_with, unproven
from pdserve.v1 import node_pb2, node_pb2_grpc

HEADER = "x-pdserve-ticket-bin"
TICKET_S = 10.0
"""Time from the node's nonce to the call."""
MAX_ISSUED = 4
"""Nonces of one connection that wait for their call; the oldest makes room, so that nobody takes another's."""
MAX_PEERS = 1024
"""Connections whose nonces are kept; more than a port takes at once (`rpc.options`)."""

Metadata = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class _Issued:
    caller_nonce: bytes
    value: bytes = field(repr=False)
    due_s: float


class TicketOffice:
    """The node's side. `peer` is gRPC's name of the connection's other end."""

    def __init__(self, secret: ClusterSecret | None, clock: Clock) -> None:
        self._secret, self._clock = secret, clock
        self._issued: OrderedDict[str, OrderedDict[bytes, _Issued]] = OrderedDict()
        """By connection, those that asked last at the end."""

    def issue(self, request: node_pb2.ProveRequest, peer: str) -> node_pb2.ProveResponse:
        """Prove the secret, and give a nonce for one ticket. Empty without a secret. Raises Unauthenticated for no nonce."""
        if self._secret is None:
            return node_pb2.ProveResponse()
        if len(request.nonce) != NONCE_BYTES:
            raise unproven(f"a proof is made over a nonce of {NONCE_BYTES} bytes")
        nonce, value = fresh_nonce(), self._secret.proving
        waiting = self._issued.setdefault(peer, OrderedDict())
        self._issued.move_to_end(peer)
        waiting[nonce] = _Issued(request.nonce, value, self._clock.now_s() + TICKET_S)
        if len(waiting) > MAX_ISSUED:
            waiting.popitem(last=False)
        if len(self._issued) > MAX_PEERS:
            self._issued.popitem(last=False)
        return node_pb2.ProveResponse(nonce=nonce, proof=proof(value, CALL_NODE, request.nonce, nonce))

    def check(self, metadata: Iterable[tuple[str, str | bytes]] | None, method: str, peer: str) -> None:
        """Raise Unauthenticated unless the call of `method` has a good ticket; without a secret (loopback) everyone may call."""
        if self._secret is None:
            return
        given = dict(metadata or ()).get(HEADER, b"")
        raw = given if isinstance(given, bytes) else given.encode("latin-1")
        nonce, ticket = raw[:NONCE_BYTES], raw[NONCE_BYTES:]
        waiting = self._issued.get(peer, OrderedDict())
        issued = waiting.pop(nonce, None)
        if not waiting:
            self._issued.pop(peer, None)
        if issued is None or self._clock.now_s() > issued.due_s:
            raise unproven(f"{method} asks for a proof of the cluster secret, fresh and made on this connection")
        if not is_proof(ticket, issued.value, CALL_TICKET, issued.caller_nonce, nonce, method.encode()):
            raise unproven("the cluster secret differs")


async def ticket_metadata(
    stub: "node_pb2_grpc.NodeServiceAsyncStub", secret: ClusterSecret | None, method: str, timeout_s: float
) -> Metadata:
    """Return the metadata that one call of `method` needs, on the stub's channel and soon; empty without a secret.

    Raises Unauthenticated, having sent nothing but a nonce, if the node does not prove the secret.
    """
    if secret is None:
        return ()
    nonce = fresh_nonce()
    answer = await stub.Prove(node_pb2.ProveRequest(nonce=nonce), timeout=timeout_s)
    value = proven_with(answer.proof, secret, CALL_NODE, nonce, answer.nonce)
    if value is None or len(answer.nonce) != NONCE_BYTES:
        raise unproven("the node does not prove the cluster secret; the call was not made")
    return ((HEADER, answer.nonce + proof(value, CALL_TICKET, nonce, answer.nonce, method.encode())),)
