"""Connections and calls without end, to a gRPC port: they are bounded, and touch nobody who is there."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.rpc import bounded_calls
from pdserve.rpc.health import MAX_WATCHERS
from pdserve.rpc.options import ServerBounds, channel_options
from pdserve.rpc.server import LIVENESS, GrpcServer
from tests.rpc.wire import connect

pytestmark = pytest.mark.asyncio

BOUND = 16
DEADLINE_S = 30.0


async def lives(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=DEADLINE_S, wait_for_ready=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_silent_connections_are_few_and_touch_nobody_who_is_there() -> None:
    server = GrpcServer("127.0.0.1", 0, bounds=ServerBounds(max_connections=BOUND))
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


WATCH, REFLECT = "/grpc.health.v1.Health/Watch", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
UNAVAILABLE, INVALID_ARGUMENT = 14, 3


@contextlib.asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", 0, bounds=ServerBounds(**bounds))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def test_calls_of_one_connection_are_bounded() -> None:
    """One connection opened 160,000 of them, and took 600 MiB."""
    async with serving(max_streams=8) as server, connect(server.port, 1000) as wire:
        calls = [wire.open(WATCH) for _ in range(64)]
        await wire.until(lambda: sum(wire.streams[call].is_reset for call in calls) >= 64 - 8 or wire.is_closed)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=channel_options()) as channel:
            assert await lives(channel)


async def test_a_connection_without_a_call_is_ended_and_one_with_a_call_is_not() -> None:
    """256 connections that answered pings and asked nothing kept every later caller out of a node."""
    async with serving(idle_s=1.0) as server, connect(server.port, 1000) as idle, connect(server.port, 1000) as busy:
        watch = busy.call(WATCH, b"")
        await busy.until(lambda: bool(busy.streams[watch].data))
        async with asyncio.timeout(DEADLINE_S):
            while not idle.is_closed:
                await idle._came.wait()
                idle._came.clear()
        assert not busy.is_closed
        assert not busy.streams[watch].is_ended


async def test_watchers_are_bounded_and_the_oldest_makes_room() -> None:
    async with serving(max_streams=2 * MAX_WATCHERS) as server, connect(server.port, 1000) as wire:
        calls = [wire.call(WATCH, b"") for _ in range(MAX_WATCHERS + 1)]
        await wire.until(lambda: wire.streams[calls[0]].is_ended)
        assert wire.streams[calls[0]].ended_with(UNAVAILABLE)
        await wire.until(lambda: bool(wire.streams[calls[-1]].data))
        told = [len(wire.streams[call].data) for call in calls]
        await server.set_ready(True)
        await wire.until(
            lambda: all(len(wire.streams[call].data) > was for call, was in zip(calls[1:], told[1:], strict=True))
        )
    assert not [each for each in calls[1:] if wire.streams[each].is_ended]


async def test_a_reflection_stream_that_asks_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_calls, "REQUEST_WAIT_S", 0.2)
    async with serving() as server, connect(server.port, 1000) as wire:
        call = wire.open(REFLECT)
        await wire.until(lambda: wire.streams[call].is_ended)
        assert wire.streams[call].ended_with(INVALID_ARGUMENT)
