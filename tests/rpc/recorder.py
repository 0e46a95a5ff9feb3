"""A real gRPC server that passes for another: it accepts every call, keeps all that it gets, and answers by a script."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
Script = Callable[[AsyncIterator[bytes], Callable[[bytes], Awaitable[None]]], Awaitable[None]]
"""Given the messages of a call and what sends one."""


async def only_listens(messages: AsyncIterator[bytes], send: Callable[[bytes], Awaitable[None]]) -> None:
    """Take everything and say nothing."""
    async for _ in messages:
        pass


@dataclass
class Recorder:
    """What strangers would get: methods, metadata and messages of every call."""

    script: Script = only_listens
    methods: list[str] = field(default_factory=list)
    metadata: list[tuple[str, bytes]] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    address: str = ""

    @property
    def everything(self) -> bytes:
        parts = [method.encode() for method in self.methods]
        parts += [key.encode() + b"=" + value for key, value in self.metadata]
        return b"\n".join(parts + self.messages)

    async def serve(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Keep one call."""

        async def kept() -> AsyncIterator[bytes]:
            async for message in requests:
                self.messages.append(message)
                yield message

        await self.script(kept(), context.write)

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Take any call, as a stream of raw messages both ways."""
        self.methods.append(details.method)
        for key, value in details.invocation_metadata or ():
            self.metadata.append((key, value if isinstance(value, bytes) else value.encode()))
        return grpc.stream_stream_rpc_method_handler(self.serve)


@asynccontextmanager
async def recording(script: Script = only_listens) -> AsyncIterator[Recorder]:
    recorder = Recorder(script)

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
            return recorder.service(handler_call_details)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handler(),))
    recorder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield recorder
    finally:
        await server.stop(0)
