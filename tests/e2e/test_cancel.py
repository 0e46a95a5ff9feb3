"""A request that is not wanted any more leaves nothing behind, at whatever stage it is and however it ends."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.client import Options
from pdserve.core.errors import DeadlineExceeded
from tests.e2e.cluster import ROOT, Cluster, start_cluster
from tests.e2e.tiny_model import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

STAGES = {"queued": "prefill0", "prefilling": "prefill0", "handing_over": "prefill0", "decoding": "decode0"}
PROMPT = tuple(range(3, 103))


@pytest_asyncio.fixture(scope="module", params=list(STAGES))
async def held(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Cluster, str]]:
    stage = str(request.param)
    hold = ("--hold-at", stage)
    budget = ("--token-budget", "32")
    async with start_cluster(
        tiny,
        tmp_path_factory.mktemp(stage),
        prefill=((*budget, *hold) if STAGES[stage] == "prefill0" else budget,),
        decode=(hold if STAGES[stage] == "decode0" else (),),
    ) as cluster:
        yield cluster, STAGES[stage]


async def test_client_cancel(held: tuple[Cluster, str]) -> None:
    cluster, node = held
    tasks = [asyncio.create_task(cluster.answer(PROMPT, Options(max_tokens=20))) for _ in range(3)]
    await cluster.until_held(node, 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await cluster.leak_oracle()


async def test_deadline(held: tuple[Cluster, str]) -> None:
    cluster, node = held
    task = asyncio.create_task(cluster.answer(PROMPT, Options(max_tokens=20, timeout_s=4.0)))
    await cluster.until_held(node)
    with pytest.raises(DeadlineExceeded):
        await task
    await cluster.leak_oracle()


async def test_killed_client(held: tuple[Cluster, str]) -> None:
    cluster, node = held
    command = [sys.executable, "-m", "pdserve.cli", "generate", "x" * 100, "--server", cluster.router.grpc]
    client = subprocess.Popen([*command, "--max-tokens", "20"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        await cluster.until_held(node)
    finally:
        client.kill()
        client.wait()
    await cluster.leak_oracle()


async def test_short_answers_still_pass(held: tuple[Cluster, str], tiny: Path) -> None:
    """Failure class 26: what was cancelled delays nobody."""
    cluster, node = held
    if node != "decode0":
        pytest.skip("nothing passes this hold")
    answer = await cluster.answer(PROMPT, Options(max_tokens=3))
    assert answer.token_ids == expected_tokens(tiny, list(PROMPT), 3)[0]
