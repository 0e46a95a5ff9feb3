"""Connections to a router, plain or with TLS, and the key that a call carries."""

import grpc

from pdserve.core.api_keys import key_fault
from pdserve.core.errors import InvalidRequest
from pdserve.rpc.options import channel_options

MAX_MESSAGE_BYTES = 64 << 20
CALL_TIMEOUT_S = 10.0
"""Deadline of the short calls; an answer has the one that its options give, or none."""


Metadata = tuple[tuple[str, str], ...]


def key_metadata(api_key: str | None) -> Metadata:
    """Return what every call carries. Raises InvalidRequest for a key that cannot be sent; the error does not show it."""
    if not api_key:
        return ()
    fault = key_fault(api_key)
    if fault:
        raise InvalidRequest(f"the API key {fault}", hint="give one key", field="api_key")
    return (("authorization", f"Bearer {api_key}"),)


def open_channel(address: str, root_certificates: bytes | None) -> grpc.Channel:
    """Return a channel of plain stubs. `root_certificates` (PEM): speak TLS and trust these."""
    options = channel_options(MAX_MESSAGE_BYTES)
    if root_certificates is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root_certificates), options=options)


def open_async_channel(address: str, root_certificates: bytes | None) -> grpc.aio.Channel:
    """Return a channel of asyncio's stubs. `root_certificates` (PEM): speak TLS and trust these."""
    options = channel_options(MAX_MESSAGE_BYTES)
    if root_certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root_certificates), options=options)
