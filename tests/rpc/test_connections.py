"""Connections that say nothing, to a gRPC port: they are bounded, and touch nobody who is there."""

import asyncio
import contextlib
import socket

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.rpc.options import channel_options
from pdserve.rpc.server import LIVENESS, GrpcServer

pytestmark = pytest.mark.asyncio

BOUND = 16
DEADLINE_S = 30.0


async def lives(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=DEADLINE_S, wait_for_ready=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_silent_connections_are_few_and_touch_nobody_who_is_there() -> None:
    server = GrpcServer("127.0.0.1", 0, max_connections=BOUND)
    await server.start()
    address = ("127.0.0.1", server.port)
    process = psutil.Process()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=channel_options()) as channel:
            assert await lives(channel)
            before = process.num_fds()
            with contextlib.ExitStack() as stack:
                strangers = [
                    stack.enter_context(socket.create_connection(address, DEADLINE_S)) for _ in range(8 * BOUND)
                ]
                cut = await asyncio.to_thread(lambda: sum(map(is_cut, strangers[BOUND:])))
                assert cut == len(strangers) - BOUND
                # All are cut in time; those beyond the bound are while the others still stand.
                assert any(map(is_open, strangers[:BOUND]))
                assert process.num_fds() - before - len(strangers) < BOUND + 4
                assert await lives(channel)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=channel_options()) as later:
            assert await lives(later)
    finally:
        await server.stop(0)


def is_cut(stranger: socket.socket) -> bool:
    """Wait for the end of a connection: what the server says first does not count."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def is_open(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    with contextlib.suppress(ConnectionError):
        try:
            while stranger.recv(4096):
                pass
        except BlockingIOError:
            return True
    return False
