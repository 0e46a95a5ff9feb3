"""gRPC ignores a misspelt option silently (failure class 29), so every name is looked up in gRPC's own binary."""

import mmap
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdserve.rpc.options import KEEPALIVE_MS, ServerBounds, channel_options, server_options

NAMES = sorted({name for name, _ in channel_options() + server_options(ServerBounds())})


@pytest.mark.parametrize("name", NAMES)
def test_grpc_knows_the_option(name: str) -> None:
    core = find_spec("grpc._cython.cygrpc")
    assert core is not None
    assert core.origin is not None
    with Path(core.origin).open("rb") as binary, mmap.mmap(binary.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(name.encode() + b"\0") >= 0, f"{name} is not spelt as gRPC spells it"


def test_a_server_accepts_the_pings_of_our_clients() -> None:
    """Else it answers GOAWAY `too_many_pings`."""
    server, client = dict(server_options(ServerBounds())), dict(channel_options())
    assert int(server["grpc.http2.min_ping_interval_without_data_ms"]) <= int(client["grpc.keepalive_time_ms"])
    assert client["grpc.keepalive_time_ms"] == KEEPALIVE_MS
    assert server["grpc.so_reuseport"] == 0
