"""Connections to a router, plain or with TLS."""

import grpc

from pdserve.rpc.options import channel_options

MAX_MESSAGE_BYTES = 64 << 20
CALL_TIMEOUT_S = 10.0
"""Deadline of the short calls; an answer has the one that its options give, or none."""


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
