"""Requests that the router refuses over the wire: a named status with field and hint, and nothing left behind."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pdserve.core.errors import DeadlineExceeded, InvalidRequest, NoNodes, Overloaded
from pdserve.router.placement import MAX_WAITING_PER_NODE
from pdserve.rpc.errors import error_from_rpc
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import IDS, ask, collect, failure
from tests.router.scripted_node import DEADLINE_S, Stage, start_stage, until

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


def say_waiting(stage: Stage, number: int) -> None:
    """Let the prefill node report that many waiting prompts."""
    linked = [stage.decode[0].incarnation]
    stage.prefill[0].say(status=node_pb2.NodeStatus(num_waiting=number, connected_peers=linked, num_free_blocks=100))


def num_waiting(stage: Stage) -> float:
    return stage.gauges()["waiting"]


async def test_busy_nodes_make_requests_wait_in_line_and_the_line_is_bounded(tmp_path: Path) -> None:
    async with start_stage(tmp_path, max_queue=2) as stage:
        await stage.until("ready", 2)
        say_waiting(stage, MAX_WAITING_PER_NODE)
        await until(lambda: stage.router.membership.loads()[0].num_waiting)
        calls = [ask(stage, 1, request_id=str(index)) for index in range(2)]
        await until(lambda: num_waiting(stage) == 2)
        refused = await failure(ask(stage, 1))
        assert isinstance(refused, Overloaded)
        assert "wait for nodes" in refused.message
        say_waiting(stage, 0)
        for _ in calls:
            submit = await stage.prefill[0].next_of("submit")
            stage.prefill[0].first_token(submit, IDS[0])
            stage.prefill[0].released(submit)
        for call in calls:
            await collect(call)
        await stage.leak_oracle()


@pytest.mark.parametrize("how", ["cancel", "deadline", "queue_wait_s"])
async def test_a_request_may_leave_the_line(tmp_path: Path, how: str) -> None:
    async with start_stage(tmp_path, queue_wait_s=0.2 if how == "queue_wait_s" else 60.0) as stage:
        await stage.until("ready", 2)
        say_waiting(stage, MAX_WAITING_PER_NODE)
        await until(lambda: stage.router.membership.loads()[0].num_waiting)
        call = ask(stage, timeout=0.3 if how == "deadline" else DEADLINE_S)
        await until(lambda: num_waiting(stage) == 1)
        if how == "cancel":
            call.cancel()
        else:
            assert isinstance(await failure(call), DeadlineExceeded if how == "deadline" else Overloaded)
        await stage.leak_oracle()


async def test_a_router_without_addresses_says_so(tmp_path: Path) -> None:
    async with start_stage(tmp_path, num_prefill=0, num_decode=0) as stage:
        error = await failure(ask(stage))
        assert isinstance(error, NoNodes)
        assert "no prefill address" in error.hint
        assert error.retry_after_s is not None
