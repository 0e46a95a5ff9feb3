"""Answers through real processes: exact, streamed, counted, and refused by name."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pdserve.client import Answer, Chat, Options, Turn
from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.work import FinishReason
from pdserve.rpc.errors import error_from_rpc
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.e2e.cluster import DEADLINE_S, Cluster, start_cluster, until
from tests.e2e.tiny_model import MAX_LEN, decided_prompts, expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

POOL_TOKENS = 16 * 56


@pytest_asyncio.fixture(scope="module")
async def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("answers")
    async with start_cluster(
        tiny,
        folder,
        prefill=(("--block-size", "16", "--kv-blocks", "64", "--token-budget", "48"),),
        decode=(("--block-size", "32", "--kv-blocks", "28"),),
    ) as running:
        yield running


@pytest_asyncio.fixture(autouse=True)
async def oracle(cluster: Cluster) -> AsyncIterator[None]:
    yield
    await cluster.leak_oracle()


def assert_exact(answer: Answer, folder: Path, prompt: list[int], num_tokens: int) -> None:
    """The parity oracle: tokens equal, log-probabilities within 1e-3."""
    tokens, logprobs = expected_tokens(folder, prompt, num_tokens)
    assert answer.token_ids == tokens
    given = [logprob for delta in answer.deltas for logprob in delta.logprobs]
    assert given == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 200, 500])
async def test_token_ids_give_the_tokens_of_transformers(cluster: Cluster, tiny: Path, length: int) -> None:
    prompt = [3 + (7 * i) % 256 for i in range(length)]
    answer = await cluster.answer(tuple(prompt), Options(max_tokens=24))
    assert_exact(answer, tiny, prompt, 24)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.summary is not None
    usage = answer.summary.usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (length, 0, 24)


async def test_text_and_chat_are_encoded_as_the_model_says(cluster: Cluster, tiny: Path) -> None:
    text = await cluster.answer("hello ✓", Options(max_tokens=8))
    assert_exact(text, tiny, prompt_ids("hello ✓"), 8)
    chat = await cluster.answer(Chat((Turn("user", "hi"),)), Options(max_tokens=8))
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert_exact(chat, tiny, prompt_ids(rendered), 8)


async def test_one_message_holds_the_same_answer(cluster: Cluster, tiny: Path) -> None:
    prompt = prompt_ids("unary")
    answer = await cluster.client.complete(tuple(prompt), Options(max_tokens=12))
    assert_exact(answer, tiny, prompt, 12)


async def test_batches_share_forwards_and_stay_exact(cluster: Cluster, tiny: Path) -> None:
    """Many sequences per forward. (The tiny model decodes about as fast as prompts arrive; SmolLM2 is held to under 100.)"""
    before = await cluster.gauge("decode0", "forwards")
    prompts = decided_prompts(tiny, 16, 12, 64)
    answers = await asyncio.gather(*(cluster.answer(tuple(p), Options(max_tokens=64)) for p in prompts))
    forwards = await cluster.gauge("decode0", "forwards") - before
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_exact(answer, tiny, prompt, 64)
    assert forwards < 16 * 63 / 3


async def test_a_single_token_never_reaches_the_decode_node(cluster: Cluster, tiny: Path) -> None:
    steps = await cluster.gauge("decode0", "steps")
    answer = await cluster.answer("once", Options(max_tokens=1))
    assert_exact(answer, tiny, prompt_ids("once"), 1)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.LENGTH
    assert await cluster.gauge("decode0", "steps") == steps


@pytest.mark.parametrize("index", [0, 1, 5])
async def test_stop_ids_end_the_answer_wherever_they_fall(cluster: Cluster, tiny: Path, index: int) -> None:
    """Failure class 10: a request that ends at its first token is never decoded."""
    prompt = [3 + (5 * i) % 256 for i in range(20)]
    tokens, _ = expected_tokens(tiny, prompt, 24)
    stop = tokens[index]
    end = tokens.index(stop)
    steps = await cluster.gauge("decode0", "steps")
    answer = await cluster.answer(tuple(prompt), Options(max_tokens=24, stop_token_ids=(stop,)))
    assert answer.token_ids == tokens[: end + 1]
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.stop_token_id) == (FinishReason.STOP, stop)
    if end == 0:
        assert await cluster.gauge("decode0", "steps") == steps


async def test_stop_text_is_neither_shown_nor_counted(cluster: Cluster) -> None:
    whole = await cluster.answer("stop text", Options(max_tokens=24))
    clean = [i for i in range(2, len(whole.text) - 2) if "�" not in whole.text[: i + 2]]
    assert clean, "the tiny model must say something readable here"
    cut = clean[0]
    stop = whole.text[cut : cut + 2]
    answer = await cluster.answer("stop text", Options(max_tokens=24, stop=(stop,)))
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.stop) == (FinishReason.STOP_SEQUENCE, stop)
    assert answer.summary is not None
    assert answer.summary.usage.completion_tokens == len(answer.token_ids)


async def test_one_label_may_be_used_twice_at_once(cluster: Cluster, tiny: Path) -> None:
    options = Options(max_tokens=16, request_id="same")
    first, second = await asyncio.gather(cluster.answer("twice", options), cluster.answer("twice", options))
    for answer in (first, second):
        assert_exact(answer, tiny, prompt_ids("twice"), 16)
        assert answer.summary is not None
        assert answer.summary.request_id == "same"


async def test_seeded_sampling_is_the_same_alone_and_in_a_batch(cluster: Cluster) -> None:
    """Failure class 19."""
    options = Options(max_tokens=24, temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=7)
    alone = await cluster.answer("seeded", options)
    noise = [cluster.answer(f"other {n}", Options(max_tokens=32, temperature=1.0)) for n in range(6)]
    batched, *_ = await asyncio.gather(cluster.answer("seeded", options), *noise)
    assert batched.token_ids == alone.token_ids
    other_seed = await cluster.answer("seeded", Options(max_tokens=24, temperature=1.5, seed=8))
    assert other_seed.token_ids != alone.token_ids


async def test_an_unset_seed_is_drawn_and_told(cluster: Cluster) -> None:
    first = await cluster.answer("draw", Options(max_tokens=16, temperature=1.5))
    assert first.summary is not None
    again = await cluster.answer("draw", Options(max_tokens=16, temperature=1.5, seed=first.summary.seed))
    assert again.token_ids == first.token_ids


async def test_the_timeline_adds_up_and_names_its_processes(cluster: Cluster) -> None:
    answer = await cluster.answer(tuple(range(3, 203)), Options(max_tokens=8))
    assert answer.summary is not None
    timeline = answer.summary.timeline
    assert sum(stage.duration_s for stage in timeline.stages) == pytest.approx(timeline.e2el_s, abs=1e-6)
    for stage in timeline.stages:
        assert sum(duration for _, duration in stage.nodes) <= stage.duration_s + 1e-6, stage
        assert stage.hop_s >= 0
    names = {name for stage in timeline.stages for name, _ in stage.nodes}
    assert {"prefill.compute", "decode.compute"} <= names
    assert timeline.overlapped.kv_bytes == 200 * 3 * 2 * 2 * 16 * 4
    roles = {process.role.label: process for process in answer.summary.processes}
    assert set(roles) == {"router", "prefill", "decode"}
    assert (roles["prefill"].block_size, roles["decode"].block_size) == (16, 32)
    assert roles["prefill"].weight_digest == roles["decode"].weight_digest != ""


REFUSED: list[tuple[str, Callable[[pb.GenerateRequest], Any], str, str]] = [
    ("no input", lambda r: r.ClearField("text"), "INVALID_ARGUMENT", "input"),
    ("empty text", lambda r: setattr(r, "text", ""), "INVALID_ARGUMENT", "text"),
    ("no ids", lambda r: r.token_ids.SetInParent(), "INVALID_ARGUMENT", "token_ids"),
    ("id out of range", lambda r: r.token_ids.ids.extend([259]), "INVALID_ARGUMENT", "token_ids"),
    ("too long", lambda r: r.token_ids.ids.extend([5] * MAX_LEN), "INVALID_ARGUMENT", "token_ids"),
    ("beyond the pool", lambda r: r.token_ids.ids.extend([5] * (POOL_TOKENS + 1)), "INVALID_ARGUMENT", "token_ids"),
    ("max_tokens 0", lambda r: setattr(r.stop, "max_tokens", 0), "INVALID_ARGUMENT", "stop.max_tokens"),
    ("NaN", lambda r: setattr(r.sampling, "temperature", float("nan")), "INVALID_ARGUMENT", "sampling.temperature"),
    ("negative", lambda r: setattr(r.sampling, "temperature", -1.0), "INVALID_ARGUMENT", "sampling.temperature"),
    ("top_p 0", lambda r: setattr(r.sampling, "top_p", 0.0), "INVALID_ARGUMENT", "sampling.top_p"),
    ("min_p 1", lambda r: setattr(r.sampling, "min_p", 1.0), "INVALID_ARGUMENT", "sampling.min_p"),
    ("unknown model", lambda r: setattr(r, "model", "nobody"), "NOT_FOUND", "model"),
    ("n", lambda r: setattr(r, "n", 65), "INVALID_ARGUMENT", "n"),
    ("tools", lambda r: r.chat.tools.append("{}"), "INVALID_ARGUMENT", "chat"),
    ("top_logprobs", lambda r: setattr(r, "top_logprobs", 21), "INVALID_ARGUMENT", "top_logprobs"),
    ("cache_salt", lambda r: setattr(r, "cache_salt", "s"), "UNIMPLEMENTED", "cache_salt"),
    ("objectives", lambda r: setattr(r.objectives, "ttft_s", 1.0), "UNIMPLEMENTED", "objectives"),
    ("hopeless text", lambda r: setattr(r, "text", "x" * 4_000_000), "INVALID_ARGUMENT", "text"),
    ("endless chat", lambda r: r.chat.messages.extend([pb.ChatMessage(role="u")] * 4097), "INVALID_ARGUMENT", "chat"),
    ("long label", lambda r: setattr(r, "request_id", "x" * 129), "INVALID_ARGUMENT", "request_id"),
]


async def refusal(cluster: Cluster, request: pb.GenerateRequest) -> tuple[str, PdserveError]:
    """Send a raw request; its status code and typed error."""
    async with grpc.aio.insecure_channel(cluster.router.grpc) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
    return raised.value.code().name, error_from_rpc(raised.value)


@pytest.mark.parametrize(("change", "code", "field"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
async def test_bad_input_is_refused_by_name(
    cluster: Cluster, change: Callable[[pb.GenerateRequest], Any], code: str, field: str
) -> None:
    request = pb.GenerateRequest(text="hello")
    change(request)
    status, error = await refusal(cluster, request)
    assert status == code, str(error)
    assert error.field.startswith(field) or field.startswith(error.field), str(error)
    assert error.field
    assert error.hint, "every refusal says what to do"


async def test_bytes_that_do_not_parse_are_refused(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.router.grpc) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            "/pdserve.v1.InferenceService/Generate"
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call(b"\xff\xff\xff", timeout=DEADLINE_S):
                pass
    error = error_from_rpc(raised.value)
    assert isinstance(error, InvalidRequest)
    assert error.hint


async def test_an_oversize_message_is_refused(cluster: Cluster) -> None:
    status, error = await refusal(cluster, pb.GenerateRequest(text="x" * (5 << 20)))
    assert status == "INVALID_ARGUMENT"
    assert "4194304" in str(error)


async def test_garbage_on_every_port_changes_nothing(cluster: Cluster, tiny: Path) -> None:
    state = await cluster.node_state("decode0")
    assert state.process.role == pb.ROLE_DECODE
    ports = [int(process.grpc.rpartition(":")[2]) for process in (cluster.router, *cluster.nodes.values())]
    ports += await kv_ports(cluster)
    for port in ports:
        for garbage in (b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
            with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as stranger:
                stranger.sendall(garbage)
    answer = await cluster.answer("after garbage", Options(max_tokens=16))
    assert_exact(answer, tiny, prompt_ids("after garbage"), 16)


async def kv_ports(cluster: Cluster) -> list[int]:
    """Return the ports that decode nodes take KV at."""
    nodes = (await cluster.state()).nodes
    ports = [int(address.rpartition(":")[2]) for node in nodes for address in node.kv_addresses]
    assert len(ports) == 1, "one decode node, one port"
    return ports


async def test_reflection_health_and_models(cluster: Cluster, tiny: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    for process in (cluster.router, *cluster.nodes.values()):
        async with grpc.aio.insecure_channel(process.grpc) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def is_serving(health: Any = health) -> bool:
                answer = await health.Check(health_pb2.HealthCheckRequest())
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            await until(is_serving, f"{process.name} is ready")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            names = [service.name async for answer in call for service in answer.list_services_response.service]
            assert any(name.startswith("pdserve.v1.") for name in names), process.name
    [model] = await cluster.client.models()
    assert (model.name, model.max_model_len, model.has_chat_template) == ("tiny", POOL_TOKENS, True)
