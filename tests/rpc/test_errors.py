"""Every error of the tree crosses a real call and arrives as it was."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve.core.errors import GRPC_CODES, ConfigError, PdserveError
from pdserve.rpc.errors import abort_with, code_of, error_from_rpc
from pdserve.rpc.options import ServerBounds, channel_options, server_options

KINDS = [kind for kind in GRPC_CODES if kind is not ConfigError]


def every_class(root: type[PdserveError]) -> set[type[PdserveError]]:
    found = set(root.__subclasses__())
    return found.union(*(every_class(kind) for kind in found)) if found else found


def test_every_error_has_a_code() -> None:
    assert every_class(PdserveError) == set(GRPC_CODES)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_round_trip(kind: type[PdserveError]) -> None:
    sent = kind("what", hint="do this", field="sampling.top_p", retry_after_s=1.5, metadata={"num_tokens_sent": "7"})

    async def refuse(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        await abort_with(context, sent)
        yield b""

    server = grpc.aio.server(options=server_options(ServerBounds()))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Refuser", {"Refuse": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        open_call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/test.Refuser/Refuse")
        call = open_call(b"")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    await server.stop(0)
    received = error_from_rpc(raised.value)
    assert raised.value.code() is code_of(sent)
    assert (type(received), received.message, received.hint, received.field) == (kind, "what", "do this", sent.field)
    assert (received.retry_after_s, received.metadata) == (1.5, {"num_tokens_sent": "7"})
