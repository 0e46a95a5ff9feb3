"""A failed call as the typed error that it means."""

import grpc

from pdserve.client.unreachable import unreachable
from pdserve.core.errors import DeadlineExceeded, InternalError, InvalidRequest, PdserveError
from pdserve.rpc.errors import error_from_rpc


def error_of(address: str, error: grpc.RpcError, *, has_begun: bool = False, speaks_tls: bool = False) -> PdserveError:
    """Return the router's own error, or the one that says why no router answered. `has_begun`: parts had arrived."""
    lost = unreachable(address, error, has_begun=has_begun, speaks_tls=speaks_tls)
    if lost is not None:
        return lost
    if "larger than max" in (error.details() or ""):
        return too_large(error.details() or "")
    typed = error_from_rpc(error)
    if isinstance(typed, DeadlineExceeded) and not typed.hint:
        return DeadlineExceeded("the deadline passed before the answer was complete", hint="allow more time")
    return typed


def too_large(details: str) -> InvalidRequest:
    """Return the error for a message that gRPC itself refused: RESOURCE_EXHAUSTED there, but no later try can help."""
    if "CLIENT: Received" in details:
        return InvalidRequest("the answer is larger than this client takes in one message", hint="stream it")
    return InvalidRequest(
        "the request is larger than the router takes",
        hint="shorten it; `pdserve router --max-message-bytes` is the bound",
    )


def no_summary() -> InternalError:
    """Return the error of a stream that ended as if all were well, and was not whole."""
    return InternalError("the answer ended without a summary", hint="the router broke its contract; see its log")
