"""Clients that read nothing, on the wire: their calls end at the transport, and nobody else's do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pdserve.core.errors import GRPC_CODES, NoNodes, PdserveError, SlowReader
from pdserve.rpc import bounded_calls
from pdserve.rpc.errors import abort_with, error_from_rpc
from pdserve.rpc.options import channel_options
from pdserve.rpc.server import GrpcServer
from tests.rpc.wire import DEADLINE_S, Wire, connect

pytestmark = pytest.mark.asyncio

SERVICE = "test.Talker"
LARGE = b"x" * 200_000
RESOURCE_EXHAUSTED, INVALID_ARGUMENT = 8, 3
SERVING, NOT_SERVING = 1, 2
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

Context = grpc.aio.ServicerContext[Any, Any]


class Talker:
    """A service that says too much, in every way in which a handler can."""

    def __init__(self) -> None:
        self.num_running = 0
        self.errors: list[PdserveError] = []

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Once": grpc.unary_unary_rpc_method_handler(self.once),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "Write": grpc.unary_stream_rpc_method_handler(self.write),
            "Yield": grpc.unary_stream_rpc_method_handler(self.yield_),
            "Leave": grpc.stream_stream_rpc_method_handler(self.leave),
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def once(self, request: bytes, context: Context) -> bytes:
        return LARGE

    async def collect(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        return LARGE * len([request async for request in requests])

    async def write(self, request: bytes, context: Context) -> None:
        self.num_running += 1
        try:
            for _ in range(100):
                await context.write(LARGE)
        except PdserveError as error:
            self.errors.append(error)
            await abort_with(context, error)
        finally:
            self.num_running -= 1

    async def yield_(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        self.num_running += 1
        try:
            for _ in range(100):
                yield LARGE
        finally:
            self.num_running -= 1

    async def leave(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Return while a message is under way, as a node leaves a router that does not read."""
        writing = asyncio.create_task(context.write(LARGE))
        await anext(requests)
        await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])

    async def echo(self, request: bytes, context: Context) -> bytes:
        if request == b"fail":
            raise NoNodes("none", hint="add one", retry_after_s=2.0)
        return request


@asynccontextmanager
async def served(
    unread_s: float = 0.2, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> AsyncIterator[tuple[GrpcServer, Talker]]:
    talker = Talker()
    server = GrpcServer("127.0.0.1", 0, unread_s=unread_s, interceptors=interceptors)
    server.add(SERVICE, talker.register)
    await server.start()
    try:
        yield server, talker
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await server.stop(0)


async def until_idle(num_tasks: int) -> None:
    """Wait until no task of a call is left."""
    async with asyncio.timeout(DEADLINE_S):
        while len(asyncio.all_tasks()) > num_tasks:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def still_serves(wire: Wire) -> None:
    """Check that another call of the same connection is answered."""
    other = wire.call(f"/{SERVICE}/Echo", b"hello")
    wire.grant(other, 1000)
    await wire.until(lambda: wire.streams[other].ended_with(0))
    assert wire.streams[other].data.endswith(b"hello")


@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("method", ["Once", "Collect", "Write", "Yield", "Leave"])
async def test_a_call_that_nobody_reads_ends_on_the_wire(method: str, window: int) -> None:
    """It stayed open for as long as the client liked: the status stood behind the bytes that flow control held back."""
    async with served() as (server, talker), connect(server.port, window) as wire:
        await still_serves(wire)
        num_tasks = len(asyncio.all_tasks())
        number = wire.call(f"/{SERVICE}/{method}", b"")
        stream = wire.streams[number]
        await wire.until(lambda: stream.is_ended and stream.is_reset)
        assert stream.ended_with(RESOURCE_EXHAUSTED)
        assert b"SLOW_READER: " in stream.headers[-1]
        assert len(stream.data) == window
        await still_serves(wire)
        await until_idle(num_tasks)
        assert talker.num_running == 0


async def test_a_health_watcher_that_reads_nothing_holds_up_no_other_and_no_change() -> None:
    """The package's own servicer waited for it, lock in hand: a stranger kept a router from becoming ready, and from ending."""
    patient = served(unread_s=DEADLINE_S)
    async with patient as (server, _), connect(server.port) as deaf, connect(server.port, 1000) as wire:
        silent, watching = deaf.call(WATCH, b""), wire.call(WATCH, b"")
        await deaf.until(lambda: bool(deaf.streams[silent].headers))
        told = [health_said(state) for state in (NOT_SERVING, SERVING, NOT_SERVING)]

        def has_heard(number: int) -> bool:
            return wire.streams[watching].data == b"".join(told[:number])

        for number, ready in enumerate((True, False), 1):
            await wire.until(partial(has_heard, number))
            async with asyncio.timeout(DEADLINE_S):
                await server.set_ready(ready)
        await wire.until(partial(has_heard, 3))
        assert not deaf.streams[silent].is_ended


def health_said(state: int) -> bytes:
    message: bytes = health_pb2.HealthCheckResponse(status=state).SerializeToString()
    return b"\0" + len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize("method", [WATCH, REFLECTION])
async def test_the_standard_services_end_such_calls_too(method: str) -> None:
    question = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
    async with served() as (server, _), connect(server.port) as wire:
        await still_serves(wire)
        number = wire.call(method, question if method == REFLECTION else b"")
        await wire.until(lambda: wire.streams[number].ended_with(RESOURCE_EXHAUSTED))
        await still_serves(wire)


async def test_a_request_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without its message was kept for ever, and cost a task and a stream."""
    monkeypatch.setattr(bounded_calls, "REQUEST_WAIT_S", 0.2)
    async with served() as (server, _), connect(server.port, 1000) as wire:
        await still_serves(wire)
        num_tasks = len(asyncio.all_tasks())
        late, empty = wire.open(f"/{SERVICE}/Echo"), wire.open(f"/{SERVICE}/Echo")
        wire.end(empty)
        await wire.until(lambda: all(wire.streams[number].ended_with(INVALID_ARGUMENT) for number in (late, empty)))
        await still_serves(wire)
        await until_idle(num_tasks)


async def test_who_comes_back_in_time_has_lost_nothing() -> None:
    async with served(unread_s=DEADLINE_S) as (server, _), connect(server.port) as wire:
        number = wire.call(f"/{SERVICE}/Once", b"")
        stream = wire.streams[number]
        await wire.until(lambda: bool(stream.headers))
        wire.grant(0, 1 << 20)
        wire.grant(number, 1 << 20)
        await wire.until(lambda: stream.ended_with(0))
        assert stream.data[5:] == LARGE


class KeyAsked(grpc.aio.ServerInterceptor):
    """Gives callers without a key another handler."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler for this caller."""
        if ("key", "good") in tuple(handler_call_details.invocation_metadata or ()):
            return await continuation(handler_call_details)

        async def refuse(requests: object, context: Context) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED)

        return grpc.stream_stream_rpc_method_handler(refuse)


@pytest.mark.parametrize("first", [True, False])
async def test_what_an_interceptor_says_to_one_caller_holds_for_no_other(first: bool) -> None:
    """Handlers were kept by method: whoever called it first decided whether everybody after was let in."""
    async with (
        served(interceptors=[KeyAsked()]) as (server, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Echo")
        for is_good in (first, not first, first):
            call = ask(b"hello", metadata=(("key", "good" if is_good else "bad"),), timeout=DEADLINE_S)
            assert await call.code() is (grpc.StatusCode.OK if is_good else grpc.StatusCode.UNAUTHENTICATED)


async def test_an_error_of_any_handler_is_told_with_its_details() -> None:
    async with served() as (server, _), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{SERVICE}/Echo")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ask(b"fail")
    error = error_from_rpc(raised.value)
    assert (type(error), error.message, error.hint, error.retry_after_s) == (NoNodes, "none", "add one", 2.0)


async def test_a_client_of_the_library_sees_the_error_by_its_class() -> None:
    """There is no room for details in the way past flow control: the reason stands in front of the message."""
    options = [*channel_options(), ("grpc.http2.bdp_probe", 0)]
    async with (
        served() as (server, talker),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel,
        asyncio.timeout(DEADLINE_S),
    ):
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/Write")
        call = ask(b"")
        while not talker.errors:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
    error = error_from_rpc(raised.value)
    assert raised.value.code() is grpc.StatusCode[GRPC_CODES[SlowReader]]
    assert (type(error), error.message) == (SlowReader, "the client read nothing for 0.2 s (read the stream)")
