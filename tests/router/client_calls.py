"""What a client does, for the tests of the router between scripted nodes."""

from typing import Any

import grpc
import pytest

from pdserve.core.errors import PdserveError
from pdserve.rpc.errors import error_from_rpc
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.models import byte_level_tokenizer
from tests.router.scripted_node import DEADLINE_S, Stage

IDS = byte_level_tokenizer().encode("abcdefgh").ids
Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


def ask(stage: Stage, max_tokens: int | None = 4, timeout: float = DEADLINE_S, key: str = "", **fields: Any) -> Call:
    request = inference_pb2.GenerateRequest(**({"text": "the"} | fields))
    if max_tokens is not None:
        request.stop.max_tokens = max_tokens
    return stage.stub.Generate(request, timeout=timeout, metadata=bearer(key))


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


async def collect(call: Call) -> tuple[str, list[int], inference_pb2.Summary]:
    text = ""
    ids: list[int] = []
    summary: inference_pb2.Summary | None = None
    while isinstance(message := await call.read(), inference_pb2.GenerateResponse):
        for delta in message.deltas:
            text += delta.text
            ids += delta.token_ids
            assert len(delta.logprobs) == len(delta.token_ids)
        if message.HasField("summary"):
            assert summary is None
            summary = message.summary
    assert summary is not None
    return text, ids, summary


async def failure(call: "Call | grpc.aio.UnaryStreamCall[bytes, bytes]") -> PdserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_from_rpc(caught.value)


async def submits(stage: Stage) -> tuple[node_pb2.Submit, node_pb2.Submit]:
    return await stage.prefill[0].next_of("submit"), await stage.decode[0].next_of("submit")
