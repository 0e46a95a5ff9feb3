"""Channel and server options, spelt once. gRPC ignores a misspelt option silently, so a test looks each up in its binary.

Keepalive facts behind the numbers: `keepalive_timeout_ms` alone does not notice a frozen peer (the transport's write timeout
does, after 60 s); `http2.ping_timeout_ms` does, within its value. A server answers GOAWAY `too_many_pings` when its
`min_ping_interval_without_data_ms` is larger than the client's interval, so the two stand side by side here.
`min_reconnect_backoff_ms` is in truth the time that one attempt to connect may take: a refused connection is dialled again
after the initial backoff, a silent one only after this.
"""

from dataclasses import dataclass

KEEPALIVE_MS = 10_000
PING_TIMEOUT_MS = 2_000
RECONNECT_MS = (100, 1_000)
CONNECT_TIMEOUT_MS = 3_000
HANDSHAKE_MS = 30_000
"""Time for a new connection to finish its TLS handshake, or to begin HTTP/2; gRPC's own would be two minutes."""

Options = list[tuple[str, int | str]]


def channel_options(max_message_bytes: int = 4 << 20) -> Options:
    """Return the options of every channel that pdserve opens."""
    first_ms, last_ms = RECONNECT_MS
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", first_ms),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", last_ms),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A channel of its own per use: two streams must never share a fate through the global subchannel pool.
        ("grpc.use_local_subchannel_pool", 1),
    ]


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """What one gRPC port takes from all who reach it. Without arguments: a node's, which serves routers and operators."""

    max_message_bytes: int = 2 << 20
    """Largest request."""
    max_connections: int = 256
    """Those beyond are closed at once, so that they take no descriptors from what is there."""
    max_streams: int = 32
    """Calls at once on one connection. A client keeps further ones back by itself."""
    idle_s: float | None = 10.0
    """A connection without a call is ended after this time; None: never. A client dials again with its next call."""


def server_options(bounds: ServerBounds) -> Options:
    """Return the options of every server that pdserve runs. A busy port is an error, never shared."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", bounds.max_connections),
        ("grpc.max_concurrent_streams", bounds.max_streams),
        *([] if bounds.idle_s is None else [("grpc.max_connection_idle_ms", round(bounds.idle_s * 1e3))]),
        ("grpc.max_receive_message_length", bounds.max_message_bytes),
        ("grpc.max_send_message_length", -1),
    ]
