"""Why no router answers, in words for people; gRPC's own stay in the error's metadata."""

import grpc

from pdserve.core.errors import PdserveError, Unreachable

ESSENCES = {
    "Connection refused": "connection refused",
    "No route to host": "no route to the host",
    "Network is unreachable": "the network cannot be reached",
    "Domain name not found": "the host name is not known",
    "DNS resolution failed": "the host name is not known",
    "errors resolving": "the host name is not known",
    "Connection reset": "the connection was reset",
    "Socket closed": "the connection was closed",
    "Broken pipe": "the connection was closed",
    "before receiving SETTINGS": "it accepts connections and says nothing",
    "Connection timed out": "the connection timed out",
    "http1.x server": "an HTTP/1 server answers",
    "Failed parsing HTTP/2": "what answers does not speak gRPC",
    "Method not found": "what answers has no such service",
}
"""What gRPC's long texts come down to, by a part of each; the first that fits counts."""
RECONNECT_S = 0.1
"""When to dial again where nobody answered; a router that restarts is back within seconds."""
STRANGERS = ("http1.x server", "Failed parsing HTTP/2")


def essence_of(text: str) -> str:
    """Return what a text of gRPC's comes down to, or the text itself."""
    return next((essence for part, essence in ESSENCES.items() if part in text), text)


def unreachable(address: str, error: grpc.RpcError, *, has_begun: bool) -> PdserveError | None:
    """Return the error that says why no router of ours answered the call, or None if one did."""
    if error.trailing_metadata():
        return None
    details = error.details() or ""
    metadata = {"cause": details}
    is_down = error.code() is grpc.StatusCode.UNAVAILABLE
    if is_down and has_begun:
        return Unreachable(
            f"the connection to {address} was lost before the answer was complete",
            hint="what came so far is valid; ask again for the whole",
            metadata=metadata,
        )
    is_stranger = is_down and any(part in details for part in STRANGERS)
    if is_stranger or (error.code() is grpc.StatusCode.UNIMPLEMENTED and "Method not found" in details):
        return Unreachable(
            f"what answers at {address} is no pdserve router ({essence_of(details)})",
            hint="name the router's address with --server HOST:PORT; nodes and other servers take no requests",
            metadata=metadata,
        )
    if not is_down:
        return None
    return Unreachable(
        f"no router answers at {address} ({essence_of(details)})",
        hint="start one with `pdserve up`, or name another with --server HOST:PORT",
        retry_after_s=RECONNECT_S,
        metadata=metadata,
    )
