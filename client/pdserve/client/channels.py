"""Connections to a router, plain or with TLS, and the key that a call carries."""

import grpc

from pdserve.client.tls import Tls
from pdserve.core.api_keys import key_fault
from pdserve.core.certificates import TlsMaterial
from pdserve.core.errors import InvalidRequest
from pdserve.rpc import tls as rpc_tls
from pdserve.rpc.options import Options, channel_options

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


def open_channel(address: str, tls: Tls | None, root_certificates: bytes | None) -> grpc.Channel:
    """Return a channel of plain stubs, with TLS if either is given. Raises ConfigError for files of no use."""
    return rpc_tls.open_channel(address, _material(tls, root_certificates), _options(tls))


def open_async_channel(address: str, tls: Tls | None, root_certificates: bytes | None) -> grpc.aio.Channel:
    """Return a channel of asyncio's stubs, with TLS if either is given. Raises ConfigError for files of no use."""
    return rpc_tls.open_async_channel(address, _material(tls, root_certificates), _options(tls))


def _material(tls: Tls | None, root_certificates: bytes | None) -> TlsMaterial | None:
    if tls is not None and root_certificates is not None:
        raise InvalidRequest("tls and root_certificates exclude each other", hint="give tls=Tls(ca=...)", field="tls")
    if root_certificates is not None:
        return TlsMaterial(authorities=root_certificates)
    return None if tls is None else tls.material()


def _options(tls: Tls | None) -> Options:
    options = channel_options(MAX_MESSAGE_BYTES)
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options
