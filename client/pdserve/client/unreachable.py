"""Why no router answers, in words for people; gRPC's own stay in the error's metadata."""

import grpc

from pdserve.core.errors import PdserveError, Unreachable
from pdserve.rpc.tls_faults import TlsFault, tls_fault

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
TLS_FAULTS = {
    TlsFault.PLAIN_PORT: ("it does not speak TLS", "connect without tls (--tls, --tls-ca), or name the port with TLS"),
    TlsFault.TLS_PORT: (
        "it closed the connection at once, as a port that speaks TLS does",
        "if it is one, give tls=Tls(ca=FILE), --tls-ca FILE or --tls; else see whether the router behind it runs",
    ),
    TlsFault.AUTHORITY: (
        "its certificate is signed by no authority that is trusted here",
        "give the authority's file: tls=Tls(ca=FILE), or --tls-ca FILE",
    ),
    TlsFault.NAME: (
        "its certificate does not name this host",
        "dial it by a name or IP that its subjectAltName has, or give tls=Tls(server_name=NAME)",
    ),
    TlsFault.EXPIRED: (
        "its certificate is past its end, or not yet valid",
        "renew the router's tls_cert; if that is good, look at this machine's clock",
    ),
    TlsFault.PURPOSE: ("its certificate is not for servers", "make the router's tls_cert with serverAuth"),
    TlsFault.OWN_CERTIFICATE: (
        "it closed the connection after the TLS handshake, as a port does that wants a client certificate, or another one",
        "give one that its tls_client_ca signed: tls=Tls(cert=FILE, key=FILE), or --tls-cert FILE --tls-key FILE",
    ),
    TlsFault.NO_HTTP2: (
        "it speaks TLS but not gRPC",
        "name the router's gRPC port, not its HTTP port, with --server HOST:PORT",
    ),
    TlsFault.BROKEN_OFF: ("it closed the connection within the TLS handshake", "look at the log of what listens there"),
}
"""What is wrong where TLS is in question, and what to do."""
MAY_PASS = (TlsFault.TLS_PORT, TlsFault.OWN_CERTIFICATE, TlsFault.BROKEN_OFF)
"""What a router that stops or starts just now looks like too: worth another try."""
STRANGERS = ("http1.x server", "Failed parsing HTTP/2")


def essence_of(text: str) -> str:
    """Return what a text of gRPC's comes down to, or the text itself."""
    return next((essence for part, essence in ESSENCES.items() if part in text), text)


def unreachable(
    address: str, error: grpc.RpcError, *, has_begun: bool, speaks_tls: bool = False
) -> PdserveError | None:
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
    fault = tls_fault(details, speaks_tls=speaks_tls)
    if fault is not None:
        essence, hint = TLS_FAULTS[fault]
        retry_after_s = RECONNECT_S if fault in MAY_PASS else None
        message = f"no router answers at {address} ({essence})"
        return Unreachable(message, hint=hint, retry_after_s=retry_after_s, metadata=metadata)
    return Unreachable(
        f"no router answers at {address} ({essence_of(details)})",
        hint="start one with `pdserve up`, or name another with --server HOST:PORT",
        retry_after_s=RECONNECT_S,
        metadata=metadata,
    )
