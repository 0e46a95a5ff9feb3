"""KV between real processes of one host: through shared memory unless told otherwise, and in 8 bits where both sides agree."""

from pathlib import Path

import pytest

from pdserve.client import Answer, Options
from pdserve.kvtransfer.nixl_engine import INSTALL, installed_package
from tests.e2e.cluster import Cluster, start_cluster
from tests.e2e.tiny_model import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

PROMPT = [(7 * i) % 200 + 10 for i in range(100)]
NUM_TOKENS = 8
PLAIN_BYTES, SMALL_BYTES = 3 * 2 * 2 * 16 * 4, 3 * 2 * 2 * (16 + 4)
"""Of one token of the tiny model: 3 layers, 2 KV heads, K and V of 16 numbers."""


async def answer(cluster: Cluster) -> Answer:
    return await cluster.answer(tuple(PROMPT), Options(max_tokens=NUM_TOKENS))


def kv_bytes(given: Answer) -> int:
    assert given.summary is not None
    return given.summary.timeline.overlapped.kv_bytes


async def test_shared_memory_is_the_default_and_exact(tiny: Path, tmp_path: Path) -> None:
    async with start_cluster(tiny, tmp_path, prefill=((), ("--kv-shared-memory", "off"))) as cluster:
        for _ in range(4):
            given = await answer(cluster)
            assert given.token_ids == expected_tokens(tiny, PROMPT, NUM_TOKENS)[0]
            assert kv_bytes(given) == 100 * PLAIN_BYTES
        assert await cluster.gauge("prefill0", "kv_shared_links") == 1
        assert await cluster.gauge("decode0", "kv_shared_links") == 1
        shared = [await cluster.gauge(name, "kv_shared_bytes_total") for name in ("prefill0", "decode0")]
        assert shared[0] == shared[1] > 0
        assert await cluster.gauge("prefill0", "kv_shared_fallbacks_total") == 0
        await cluster.leak_oracle()


@pytest.mark.skipif(installed_package() is None, reason=f"NIXL is not installed ({INSTALL})")
async def test_nixl_is_exact_and_who_has_another_engine_is_reached_over_tcp(tiny: Path, tmp_path: Path) -> None:
    nixl = ("--kv-engine", "nixl")
    async with start_cluster(tiny, tmp_path, prefill=(nixl, ()), decode=(nixl,), secret="of this test") as cluster:
        for _ in range(4):
            given = await answer(cluster)
            assert given.token_ids == expected_tokens(tiny, PROMPT, NUM_TOKENS)[0]
        links = [await cluster.gauge(name, "kv_nixl_links") for name in ("prefill0", "decode0")]
        moved = [await cluster.gauge(name, "kv_nixl_bytes_total") for name in ("prefill0", "decode0")]
        assert links == [1, 1]
        assert moved[0] == moved[1] > 0
        await cluster.leak_oracle()


async def test_a_pair_that_agrees_moves_8_bits(tiny: Path, tmp_path: Path) -> None:
    small = ("--kv-wire", "int8")
    async with start_cluster(tiny, tmp_path, prefill=(small,), decode=(small,)) as cluster:
        given = await answer(cluster)
        assert len(given.token_ids) == NUM_TOKENS
        assert given.token_ids[0] == expected_tokens(tiny, PROMPT, NUM_TOKENS)[0][0], (
            "the first token needs no transfer"
        )
        assert kv_bytes(given) == 100 * SMALL_BYTES
        await cluster.leak_oracle()
