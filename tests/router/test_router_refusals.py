"""Requests that the router refuses over the wire: a named status with field and hint, and nothing left behind."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pdserve.core.errors import InvalidRequest, Overloaded
from pdserve.rpc.errors import error_from_rpc
from pdserve.v1 import inference_pb2
from tests.router.client_calls import IDS, ask, collect, failure
from tests.router.scripted_node import DEADLINE_S, Stage, start_stage

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with start_stage(tmp_path) as running:
        await running.until("ready", 2)
        yield running
        await running.leak_oracle()


BAD_INPUT: list[tuple[str, dict[str, Any]]] = [
    ("text", {"text": ""}),
    ("text", {"text": "a" * 1001}),
    ("token_ids.ids", {"text": None, "token_ids": inference_pb2.TokenIds(ids=[1 << 30])}),
    ("stop.max_tokens", {"stop": inference_pb2.StopConditions(max_tokens=0)}),
    ("stop.max_tokens", {"stop": inference_pb2.StopConditions(max_tokens=1001)}),
    ("sampling.temperature", {"sampling": inference_pb2.SamplingParameters(temperature=float("nan"))}),
    (
        "chat.messages",
        {"text": None, "chat": inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="poet")])},
    ),
]


@pytest.mark.parametrize(("field", "given"), BAD_INPUT)
async def test_bad_input_has_a_named_status(stage: Stage, field: str, given: dict[str, Any]) -> None:
    call = ask(stage, None, **given)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_rpc(caught.value)
    assert (error.field, bool(error.hint)) == (field, True)


async def test_bytes_that_do_not_parse_have_a_named_status(stage: Stage) -> None:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = stage.channel.unary_stream(
        "/pdserve.v1.InferenceService/Generate"
    )
    error = await failure(method(b"\xff\xff\xff", timeout=DEADLINE_S))
    assert (type(error), error.field) == (InvalidRequest, "GenerateRequest")


async def test_an_oversize_request_has_a_named_status(tmp_path: Path) -> None:
    async with start_stage(tmp_path, max_message_bytes=100_000) as stage:
        await stage.until("ready", 2)
        error = await failure(ask(stage, text="a" * 100_001))
        assert (type(error), error.field) == (InvalidRequest, "GenerateRequest")


async def test_overload_is_refused_at_once_with_a_time(tmp_path: Path) -> None:
    async with start_stage(tmp_path, max_sessions=1) as stage:
        await stage.until("ready", 2)
        call = ask(stage, 1)
        submit = await stage.prefill[0].next_of("submit")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stage).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(caught.value)
        kinds = {detail.TypeName() for detail in status.details}
        assert error_details_pb2.RetryInfo.DESCRIPTOR.full_name in kinds
        assert isinstance(error_from_rpc(caught.value), Overloaded)
        stage.prefill[0].first_token(submit, IDS[0])
        stage.prefill[0].released(submit)
        await collect(call)
        await stage.leak_oracle()
