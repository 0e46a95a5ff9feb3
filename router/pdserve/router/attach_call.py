"""One Attach call: messages out and in, and every way in which it can end as one exception with the node's own reason."""

import asyncio
from collections.abc import Callable

import grpc

from pdserve.core.errors import NoNodes
from pdserve.router.final_status import FinalStatus
from pdserve.router.nodes import NodeState
from pdserve.rpc.errors import error_from_rpc
from pdserve.rpc.tls_faults import TlsFault, tls_fault
from pdserve.v1 import node_pb2

CLOSED = "the node closed the stream"
CONNECT_PREFIX = "Failed to connect to remote host: "
"""What stands before this in gRPC's message repeats the address."""
TLS_REASONS = {
    TlsFault.PLAIN_PORT: "it does not speak TLS; give the node tls_cert and tls_key, or this router no tls_ca",
    TlsFault.TLS_PORT: "it closed a plain connection at once, as a node with TLS does; give this router tls_ca",
    TlsFault.AUTHORITY: "its certificate is signed by no authority in this router's tls_ca",
    TlsFault.NAME: "its certificate does not name this address; make one with it as subjectAltName",
    TlsFault.EXPIRED: "its certificate is past its end, or not yet valid",
    TlsFault.PURPOSE: "its certificate is not for servers",
    TlsFault.OWN_CERTIFICATE: "it hung up after the TLS handshake: it wants a certificate that its own tls_ca signed; "
    "give this router such tls_cert and tls_key",
    TlsFault.NO_HTTP2: "it speaks TLS but not gRPC",
    TlsFault.BROKEN_OFF: "it hung up within the TLS handshake",
}
"""Why TLS with a node fails, and what to do."""
STATUS_WAIT_S = 1.0
"""Longest wait for the status of a call that has ended already."""

Call = grpc.aio.StreamStreamCall[node_pb2.AttachRequest, node_pb2.AttachResponse]


class StreamEnded(Exception):
    """The stream is over; `state` is how the node stands now. `reason` is empty if the node gave none that arrived."""

    def __init__(self, state: NodeState, reason: str) -> None:
        super().__init__(reason)
        self.state, self.reason = state, reason


class AttachCall:
    """Reads and writes the stream. `on_broken` is called at once when it breaks, before the reason is known."""

    def __init__(self, call: Call, on_broken: Callable[[], None], *, speaks_tls: bool = False) -> None:
        self._call, self._on_broken, self._speaks_tls = call, on_broken, speaks_tls
        self._final = FinalStatus(call)

    async def write(self, message: node_pb2.AttachRequest) -> None:
        """Send one message; waits while the node does not read. Raises StreamEnded."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            raise await self._ended() from None

    async def read(self) -> node_pb2.AttachResponse:
        """Return the next message. Raises StreamEnded."""
        try:
            message = await self._call.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            raise await self._ended() from None
        if not isinstance(message, node_pb2.AttachResponse):
            raise await self._ended()
        return message

    def cancel(self) -> None:
        """End the call from this side; harmless when it is over.

        After a made-up status grpc.aio takes the call for done and its `cancel` does nothing, while the call below lives on,
        with a task and a connection; only that one's own `cancel` ends it.
        """
        if self._call.cancel() or self._final.is_known:
            return
        below = getattr(self._call, "_cython_call", None)
        if below is not None:
            below.cancel("the router left the stream")

    async def _ended(self) -> StreamEnded:
        self._on_broken()
        status = await self._final.wait(STATUS_WAIT_S)
        if status is None:
            return StreamEnded(NodeState.DOWN, "")
        if status.code() is grpc.StatusCode.OK:
            return StreamEnded(NodeState.DOWN, CLOSED)
        typed = error_from_rpc(status)
        if isinstance(typed, NoNodes) and typed.retry_after_s is not None:
            return StreamEnded(NodeState.LOADING, typed.message)
        fault = tls_fault(status.details() or "", speaks_tls=self._speaks_tls)
        if status.code() is grpc.StatusCode.UNAVAILABLE and fault is not None:
            return StreamEnded(NodeState.DOWN, TLS_REASONS[fault])
        message = typed.message.rpartition(CONNECT_PREFIX)[2]
        return StreamEnded(NodeState.DOWN, f"{status.code().name.lower()}: {message}")
