"""HTTP through real processes: what it answers is what gRPC answers, and that is what plain transformers says."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdserve.client import Options
from tests.e2e.cluster import DEADLINE_S, Cluster, start_cluster, until
from tests.e2e.tiny_model import expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
NUM_TOKENS = 12


@pytest_asyncio.fixture(scope="module")
async def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with start_cluster(tiny, tmp_path_factory.mktemp("http")) as running:
        yield running


@pytest_asyncio.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=DEADLINE_S) as client:
        yield client
    await cluster.leak_oracle()


async def choices_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every choice of an answer; those of a stream piece by piece."""
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        found: list[dict[str, Any]] = response.json()["choices"]
        return found
    events = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [choice for event in events for choice in json.loads(event.removeprefix("data: "))["choices"]]


def ids_of(choices: list[dict[str, Any]], index: int = 0) -> list[int]:
    return [one for choice in choices if choice["index"] == index for one in choice.get("token_ids", [])]


@STREAMED
async def test_completions_are_the_tokens_of_transformers(
    cluster: Cluster, tiny: Path, http: httpx.AsyncClient, stream: bool
) -> None:
    prompt = prompt_ids("over HTTP")
    tokens, logprobs = expected_tokens(tiny, prompt, NUM_TOKENS)
    asked = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True, "stream": stream}
    choices = await choices_of(http, "/v1/completions", {"prompt": prompt, "logprobs": 1, **asked})
    assert ids_of(choices) == tokens
    given = [one for choice in choices for one in (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]]
    assert given == pytest.approx(logprobs, abs=1e-3)
    grpc = await cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
    assert grpc.token_ids == tokens
    assert "".join(choice["text"] for choice in choices) == grpc.text
    as_text = await choices_of(http, "/v1/completions", {"prompt": "over HTTP", **asked})
    assert ids_of(as_text) == tokens


@STREAMED
async def test_chats_are_the_tokens_of_transformers(tiny: Path, http: httpx.AsyncClient, stream: bool) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens, logprobs = expected_tokens(tiny, prompt_ids(rendered), NUM_TOKENS)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "logprobs": True,
        "return_token_ids": True,
        "stream": stream,
    }
    choices = await choices_of(http, "/v1/chat/completions", body)
    assert ids_of(choices) == tokens
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert [entry["logprob"] for entry in entries] == pytest.approx(logprobs, abs=1e-3)


@STREAMED
async def test_a_seed_gives_the_same_tokens_on_both_fronts(
    cluster: Cluster, http: httpx.AsyncClient, stream: bool
) -> None:
    """Defaults differ between the fronts; what is asked for does not."""
    body = {"prompt": "noise", "max_tokens": NUM_TOKENS, "seed": 11, "return_token_ids": True, "ignore_eos": True}
    alone = await choices_of(http, "/v1/completions", {**body, "stream": stream})
    options = Options(max_tokens=NUM_TOKENS, temperature=1.0, seed=11, ignore_eos=True)
    assert ids_of(alone) == (await cluster.answer("noise", options)).token_ids
    several = await choices_of(http, "/v1/completions", {**body, "n": 2, "stream": stream})
    assert ids_of(several, 0) == ids_of(alone)
    assert ids_of(several, 1) != ids_of(alone)


@STREAMED
async def test_a_client_that_leaves_frees_both_nodes(cluster: Cluster, http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "long", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    asking = asyncio.create_task(http.post("/v1/completions", json=body))

    async def is_decoding() -> bool:
        return await cluster.gauge("decode0", "decode.running") == 1

    await until(is_decoding, "the request is decoded")
    asking.cancel()
    await cluster.leak_oracle()


async def test_a_decode_node_that_dies_costs_a_stream_nothing(tiny: Path, tmp_path: Path) -> None:
    """The client sees a pause; the tokens are those of an undisturbed run."""
    prompt = prompt_ids("resumed")
    tokens, _ = expected_tokens(tiny, prompt, 200)
    async with start_cluster(tiny, tmp_path, decode=((), ())) as running:
        address = f"http://{running.router.http}"
        async with httpx.AsyncClient(base_url=address, timeout=DEADLINE_S) as client:
            body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "return_token_ids": True, "stream": True}
            seen: list[int] = []
            extension: dict[str, Any] = {}
            is_killed = False
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    seen += ids_of(event["choices"])
                    extension = event.get("pdserve", extension)
                    if len(seen) > 5 and not is_killed:
                        is_killed = True
                        busy = [node for node in ("decode0", "decode1") if await running.gauge(node, "legs")]
                        running.nodes[busy[0]].kill()
        assert seen == tokens
        assert extension["timeline"]["attempts"] == 2
