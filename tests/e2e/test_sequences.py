"""n > 1 over real processes (failure class 11): nodes are lost at every stage, and each sequence still gets its own tokens."""

import asyncio
import signal
from pathlib import Path

import pytest

from pdserve.client import Options
from tests.e2e.cluster import DEADLINE_S, Cluster, start_cluster
from tests.e2e.tiny_model import prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NUM_TOKENS = 24
N = 3
OPTIONS = Options(
    n=N,
    max_tokens=NUM_TOKENS,
    temperature=1.0,
    seed=7,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    top_logprobs=2,
    ignore_eos=True,
)
PROMPT = tuple(prompt_ids("a prompt that does not fill its last block"))


async def tokens_of(cluster: Cluster) -> list[list[int]]:
    """Answer once; the token ids by sequence. Everything that must always hold of an answer is looked at here."""
    answer = await cluster.answer(PROMPT, OPTIONS)
    assert [choice.sequence for choice in answer.choices] == list(range(N))
    assert all(choice.finished is not None for choice in answer.choices)
    assert all(len(choice.top_logprobs) == len(choice.logprobs) == NUM_TOKENS for choice in answer.choices)
    assert answer.summary is not None
    assert answer.summary.usage.completion_tokens == N * NUM_TOKENS
    return [choice.token_ids for choice in answer.choices]


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of the request when nothing goes wrong."""

    async def run() -> list[list[int]]:
        async with start_cluster(tiny, tmp_path_factory.mktemp("undisturbed")) as cluster:
            assert len(PROMPT) % 16, "the last block is partial"
            tokens = await tokens_of(cluster)
            assert await cluster.gauge("decode0", "decode.copied_total") == N - 1
            assert await cluster.gauge("prefill0", "forwards") == 1, "one prefill"
            await cluster.leak_oracle()
            return tokens

    tokens = asyncio.run(run())
    assert len({tuple(ids) for ids in tokens}) == N
    return tokens


@pytest.mark.parametrize(
    ("stage", "number"),
    [("handing_over", signal.SIGKILL), ("decoding:1", signal.SIGKILL), ("decoding:9", signal.SIGTERM)],
)
async def test_a_node_is_lost(
    undisturbed: list[list[int]], tiny: Path, tmp_path: Path, stage: str, number: int
) -> None:
    """One node holds the request at a stage and is lost; the other of its role answers the rest, with the same tokens."""
    role = "prefill" if stage == "handing_over" else "decode"
    both: tuple[tuple[str, ...], ...] = (("--hold-at", stage), ())
    prefill, decode = (both, ((),)) if role == "prefill" else (((),), both)
    async with start_cluster(tiny, tmp_path, prefill=prefill, decode=decode) as cluster:
        # Two at once, so that each of the two nodes gets one.
        tasks = [asyncio.create_task(tokens_of(cluster)) for _ in range(2)]
        await cluster.until_held(f"{role}0", 1 if role == "prefill" else N)
        cluster.nodes[f"{role}0"].kill(number)
        assert await asyncio.gather(*tasks) == [undisturbed] * 2
        if number == signal.SIGTERM:
            cluster.nodes[f"{role}0"].popen.wait(DEADLINE_S)
        await cluster.leak_oracle()
