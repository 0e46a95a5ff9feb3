"""Tokenize and Detokenize over gRPC: the ids that Generate computes, and the text that it shows."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pdserve.core.errors import InvalidRequest, NotServed, Overloaded, PdserveError, UnknownModel
from pdserve.router import text_calls
from pdserve.rpc.errors import error_from_rpc
from pdserve.v1 import inference_pb2 as pb
from tests.router.client_calls import IDS, ask
from tests.router.http_calls import play
from tests.router.models import byte_level_tokenizer
from tests.router.scripted_node import Stage, start_stage

pytestmark = pytest.mark.asyncio
CHAT = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="the")])


@pytest_asyncio.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with start_stage(tmp_path_factory.mktemp("texts"), max_message_bytes=50_000) as running:
        await running.until("ready", 2)
        yield running


async def refusal(call: Awaitable[object]) -> PdserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


@pytest.mark.parametrize("given", [{"text": "the héllo wörld"}, {"chat": CHAT}], ids=["text", "chat"])
async def test_the_ids_are_those_that_generate_computes(stage: Stage, given: dict[str, Any]) -> None:
    answer = await stage.stub.Tokenize(pb.TokenizeRequest(**given))
    playing = asyncio.create_task(play(stage, IDS[:4]))
    async for _ in ask(stage, **({"text": None} | given)):
        pass
    assert list((await playing).prompt_ids) == list(answer.token_ids)
    assert [byte_level_tokenizer().token_to_id(token) for token in answer.tokens] == list(answer.token_ids)
    assert answer.max_model_len == 1000


async def test_special_tokens_can_be_left_out(stage: Stage) -> None:
    for text in ("the", "a" * 5000):
        answer = await stage.stub.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False))
        assert list(answer.token_ids) == byte_level_tokenizer().encode(text, add_special_tokens=False).ids


async def test_text_comes_back_with_and_without_special_tokens(stage: Stage) -> None:
    ids = (await stage.stub.Tokenize(pb.TokenizeRequest(chat=CHAT))).token_ids
    shown = await stage.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, show_special_tokens=True))
    assert shown.text == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    plain = await stage.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert plain.text == "user\nthe\nassistant\n"
    assert (await stage.stub.Detokenize(pb.DetokenizeRequest())).text == ""
    half = byte_level_tokenizer().encode("日").ids[:1]
    assert (await stage.stub.Detokenize(pb.DetokenizeRequest(token_ids=half))).text == "\ufffd"
    many = [IDS[0]] * 5000
    assert (await stage.stub.Detokenize(pb.DetokenizeRequest(token_ids=many))).text == "a" * 5000


async def test_what_cannot_be_cut_is_refused_by_name(stage: Stage) -> None:
    table: list[tuple[pb.TokenizeRequest, type[PdserveError], str]] = [
        (pb.TokenizeRequest(), InvalidRequest, "input"),
        (pb.TokenizeRequest(text=""), InvalidRequest, "text"),
        (pb.TokenizeRequest(text="x", model="other"), UnknownModel, "model"),
        (pb.TokenizeRequest(text="x" * 40_000), InvalidRequest, "text"),
        (pb.TokenizeRequest(chat=pb.ChatInput()), InvalidRequest, "chat.messages"),
    ]
    for request, kind, field in table:
        error = await refusal(stage.stub.Tokenize(request))
        assert (type(error), error.field) == (kind, field)
    error = await refusal(stage.stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**6])))
    assert (type(error), error.field) == (InvalidRequest, "token_ids")
    error = await refusal(stage.stub.Detokenize(pb.DetokenizeRequest(model="other")))
    assert (type(error), error.field) == (UnknownModel, "model")


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize"])
async def test_bytes_that_are_no_request_are_refused(stage: Stage, method: str) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = stage.channel.unary_unary(
        f"/pdserve.v1.InferenceService/{method}"
    )
    error = await refusal(call(b"\xff\xff"))
    assert (type(error), error.field) == (InvalidRequest, f"{method}Request")
    error = await refusal(call(bytes(50_001)))
    assert (type(error), error.field) == (InvalidRequest, f"{method}Request")


async def test_a_newer_contract_is_refused_by_name(stage: Stage) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = stage.channel.unary_unary(
        "/pdserve.v1.InferenceService/Tokenize"
    )
    inside = pb.ChatInput.FromString(CHAT.SerializeToString() + b"\xa0\x06\x01")
    newer = pb.TokenizeRequest(chat=inside).SerializeToString()
    assert isinstance(await refusal(call(newer)), NotServed)


async def test_too_many_calls_are_refused_with_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_calls, "MAX_CALLS", 0)
    error = await refusal(stage.stub.Tokenize(pb.TokenizeRequest(text="x")))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.0
