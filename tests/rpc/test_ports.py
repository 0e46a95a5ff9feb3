"""A port that cannot be bound is named, with the option that chooses it, before anything else begins."""

import socket

import pytest

from pdserve.core.errors import AddressInUse
from pdserve.rpc.ports import check_port
from pdserve.rpc.server import GrpcServer


def test_a_free_port_is_fine_and_stays_free() -> None:
    check_port("127.0.0.1", 0, "--port")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check_port("127.0.0.1", port, "--port")
    check_port("127.0.0.1", port, "--port")


def test_a_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(port)) as raised:
            check_port("127.0.0.1", port, "--kv-port")
    assert "--kv-port" in raised.value.hint


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(AddressInUse, match=r"nowhere\.invalid"):
        check_port("nowhere.invalid", 0, "--port")


@pytest.mark.asyncio
async def test_two_servers_never_share_a_port() -> None:
    first = GrpcServer("127.0.0.1", 0)
    await first.start()
    with pytest.raises(AddressInUse):
        await GrpcServer("127.0.0.1", first.port).start()
    await first.stop(0)
