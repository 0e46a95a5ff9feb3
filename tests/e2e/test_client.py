"""The client of threads and the chat in the terminal, against real processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.client import Chat, Client, Delta, Options, Turn
from tests.cli.terminal import terminal_chat
from tests.e2e.cluster import DEADLINE_S, Cluster, start_cluster
from tests.e2e.tiny_model import decided_prompts, expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NUM_TOKENS = 12


@pytest_asyncio.fixture(scope="module")
async def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with start_cluster(tiny, tmp_path_factory.mktemp("client")) as running:
        yield running


@pytest_asyncio.fixture(scope="module")
async def held(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A cluster whose answers stop after their first token."""
    folder = tmp_path_factory.mktemp("held")
    async with start_cluster(tiny, folder, decode=(("--hold-at", "decoding"),)) as running:
        yield running


async def test_threads_get_the_models_own_tokens(cluster: Cluster, tiny: Path) -> None:
    prompts = decided_prompts(tiny, 4, 20, NUM_TOKENS)
    options = Options(max_tokens=NUM_TOKENS, ignore_eos=True)

    def ask() -> list[list[int]]:
        with Client(cluster.router.grpc) as client:
            return [answer.token_ids for answer in client.complete_many(map(tuple, prompts), options, concurrency=3)]

    answers = await asyncio.to_thread(ask)
    assert answers == [expected_tokens(tiny, prompt, NUM_TOKENS)[0] for prompt in prompts]
    await cluster.leak_oracle()


async def test_tokens_and_text_are_those_of_an_answer(cluster: Cluster) -> None:
    chat = Chat((Turn("user", "one two"),))

    def ask() -> None:
        with Client(cluster.router.grpc) as client:
            whole = client.complete(chat, Options(max_tokens=NUM_TOKENS, ignore_eos=True))
            assert whole.summary is not None
            assert len(client.tokenize(chat).token_ids) == whole.summary.usage.prompt_tokens
            assert client.detokenize(whole.token_ids) == whole.text

    await asyncio.to_thread(ask)
    await cluster.leak_oracle()


async def test_leaving_a_threads_answer_frees_both_nodes(held: Cluster) -> None:
    def ask() -> None:
        for part in client.generate((3, 4, 5), Options(max_tokens=NUM_TOKENS, ignore_eos=True)):
            assert isinstance(part, Delta)
            break

    with Client(held.router.grpc) as client:
        await asyncio.to_thread(ask)
        await held.leak_oracle()


async def test_ctrl_c_in_a_chat_frees_both_nodes_and_the_chat_goes_on(held: Cluster) -> None:
    async with terminal_chat(held.router.grpc, "--max-tokens", "50") as (person, process):
        await person.read_until("> ")
        for question in ("one", "two"):
            person.type(f"{question}\n")
            await held.until_held("decode0")
            person.type("\x03")
            await person.read_until("cancelled")
            await person.read_until("> ")
            await held.leak_oracle()
        person.type("/quit\n")
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
