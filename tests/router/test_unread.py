"""Clients that read nothing: their requests end on both nodes and on the wire, by bytes or by time, and cost what is said."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve.router.packed import TOKEN_BYTES, TOP_BYTES
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import IDS
from tests.router.scripted_node import DEADLINE_S, ScriptedNode, Stage, start_stage, until
from tests.rpc.wire import Wire, connect

pytestmark = pytest.mark.asyncio

GENERATE = "/pdserve.v1.InferenceService/Generate"
RESOURCE_EXHAUSTED = 8
MAX_BYTES = 100_000
LENGTH = 1 << 20
NUM_TOP = 20
STEP = 50
"""Tokens of a sequence per message of the node."""


@contextlib.asynccontextmanager
async def long_stage(folder: Path, **given: Any) -> AsyncIterator[Stage]:
    """A router between nodes of a long model; nothing may be left at the end."""
    async with start_stage(folder, **given) as stage:
        for node in (*stage.prefill, *stage.decode):
            node.max_model_len = node.num_blocks = LENGTH
            await until(partial(is_attached, node))
            await node.attach_anew()
        await stage.until("ready", 2)
        yield stage
        await stage.leak_oracle()


def is_attached(node: ScriptedNode) -> bool:
    return node.num_streams > 0


def question(n: int = 1, num_top: int = 0, *, stream: bool = True) -> bytes:
    request = inference_pb2.GenerateRequest(text="the", n=n, top_logprobs=num_top, stream=stream)
    request.stop.max_tokens = LENGTH // 2
    return request.SerializeToString()


async def begin(stage: Stage, n: int = 1) -> node_pb2.Submit:
    """Bring the next request to where its decode node makes tokens."""
    submit: node_pb2.Submit = await stage.decode[0].next_of("submit")
    stage.prefill[0].first_tokens(submit, IDS[:1] * n)
    stage.prefill[0].released(submit)
    stage.decode[0].adopted(submit)
    return submit


def tokens(submit: node_pb2.Submit, sequence: int, first_index: int) -> node_pb2.SequenceTokens:
    num_top = submit.top_logprobs
    top = inference_pb2.TopLogprobs(token_ids=range(100, 100 + num_top), logprobs=[-1.0 - i for i in range(num_top)])
    return node_pb2.SequenceTokens(
        session_id=submit.session_id,
        attempt=submit.attempt,
        sequence=sequence,
        first_index=first_index,
        token_ids=IDS[:1] * STEP,
        logprobs=[-0.5] * STEP,
        top_logprobs=[top] * STEP if num_top else [],
    )


async def talk(stage: Stage, submit: node_pb2.Submit, n: int = 1) -> tuple[node_pb2.Cancel, int]:
    """Make tokens of every sequence until the router cancels. Return the cancel, and how many tokens the router was sent."""
    cancelled = asyncio.create_task(stage.decode[0].next_of("cancel"))
    index = 1
    while not cancelled.done():
        assert index < LENGTH // 2 - STEP, "the router took it all"
        stage.decode[0].step(tokens=[tokens(submit, sequence, index) for sequence in range(n)])
        index += STEP
        await asyncio.wait([cancelled], timeout=0.002)
    return cancelled.result(), index * n


@pytest.mark.parametrize("window", [0, 1000, 65_535])
@pytest.mark.parametrize("n", [1, 16])
async def test_beyond_the_bytes_the_nodes_are_free_at_once_and_a_client_that_comes_back_hears_why(
    tmp_path: Path, n: int, window: int
) -> None:
    """It waited for a write to return, which never did; and the bound counted a fourteenth of what it held."""
    patient = long_stage(tmp_path, max_unread_bytes=MAX_BYTES, max_unread_s=DEADLINE_S)
    async with patient as stage, connect(stage.router.server.port, window) as wire:
        number = wire.call(GENERATE, question(n, NUM_TOP))
        submit = await begin(stage, n)
        cancel, num_tokens = await talk(stage, submit, n)
        kept = num_tokens * (TOKEN_BYTES + TOP_BYTES * NUM_TOP)
        assert kept < 2 * MAX_BYTES + 3 * window + 50 * n * STEP * (TOKEN_BYTES + TOP_BYTES * NUM_TOP)
        stage.decode[0].released(cancel, node_pb2.LEG_OUTCOME_CANCELLED)
        await until(lambda: len(stage.router.sessions) == 0)
        assert not wire.streams[number].is_ended
        wire.grant(0, 1 << 24)
        wire.grant(number, 1 << 24)
        await wire.until(lambda: wire.streams[number].is_ended)
        assert wire.streams[number].ended_with(RESOURCE_EXHAUSTED)
        assert b"grpc-status-details-bin" in wire.streams[number].headers[-1], "it was told in full"


@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize("stream", [True, False])
async def test_beyond_the_time_the_call_ends_on_the_wire(tmp_path: Path, window: int, stream: bool) -> None:
    """It stayed open, with all it held, for as long as the client liked."""
    async with long_stage(tmp_path, max_unread_s=0.3) as stage, connect(stage.router.server.port, window) as wire:
        number = wire.call(GENERATE, question(stream=stream))
        submit = await begin(stage)
        if stream:
            stage.decode[0].step(tokens=[tokens(submit, 0, 1 + STEP * turn) for turn in range(10)])
            cancel = await stage.decode[0].next_of("cancel")
            stage.decode[0].released(cancel, node_pb2.LEG_OUTCOME_CANCELLED)
        else:
            last = tokens(submit, 0, 1)
            last.finish_reason = inference_pb2.FINISH_REASON_STOP
            stage.decode[0].step(tokens=[*(tokens(submit, 0, 1 + STEP * turn) for turn in range(10))])
            stage.decode[0].tokens(submit, 1 + 10 * STEP, [2], is_last=True)
            stage.decode[0].released(submit)
        await wire.until(lambda: wire.streams[number].is_ended and wire.streams[number].is_reset)
        assert wire.streams[number].ended_with(RESOURCE_EXHAUSTED)
        await still_serves(wire)
        gauges = stage.router.sessions.gauges()
        assert (gauges["failed_total"], gauges["cancelled_total"]) == ((1, 0) if stream else (0, 0))


async def still_serves(wire: Wire) -> None:
    other = wire.call("/pdserve.v1.InferenceService/ListModels", b"")
    wire.grant(other, 1000)
    await wire.until(lambda: wire.streams[other].ended_with(0))


@pytest.mark.parametrize("method", ["Tokenize", "GetClusterState"])
async def test_large_answers_of_other_calls_end_too(tmp_path: Path, method: str) -> None:
    request = inference_pb2.TokenizeRequest(text="a" * 3000).SerializeToString() if method == "Tokenize" else b""
    async with long_stage(tmp_path, max_unread_s=0.3) as stage, connect(stage.router.server.port, 10) as wire:
        number = wire.call(f"/pdserve.v1.InferenceService/{method}", request)
        await wire.until(lambda: wire.streams[number].is_ended and wire.streams[number].is_reset)
        assert wire.streams[number].ended_with(RESOURCE_EXHAUSTED)
        await still_serves(wire)
