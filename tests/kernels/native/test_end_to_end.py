"""SmolLM2 through the Triton source: real router, prefill and decode processes, the wire between them, and the goldens' tokens.

The kernels are those that a GPU is given, at smaller tiles, lowered to x86 (`lowering`). Attention, KV write, wire form and draws
are Triton's in both node processes; sampled tokens are those of the torch backend and NumPy.
"""

import os
from pathlib import Path

import pytest

from pdserve.client import Options
from pdserve.core.work import Sampling
from pdserve.engine.engine import Engine
from tests.e2e.cluster import ROOT, start_cluster
from tests.e2e.test_smollm2 import MODEL, assert_golden, prompt_of
from tests.engine.small import Generation, generate
from tests.goldens.goldens import MAX_NEW_TOKENS, Golden, load_goldens
from tests.goldens.model import default_model_dir
from tests.kernels.native.lowering import reason_not_here

REASON = reason_not_here()
pytestmark = [pytest.mark.smollm2, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SITE = Path(__file__).with_name("site")
TRITON = ("--attention-backend", "triton")
PREFILL = (*TRITON, "--block-size", "16", "--kv-blocks", "128", "--token-budget", "64")
TEMPERATURE, SEED, NUM_SAMPLED = 1.0, 2**63 + 11, 24
DECODE = (*TRITON, "--block-size", "32", "--kv-blocks", "64")


def some_goldens() -> list[Golden]:
    """One token, a short prompt, and the shortest that takes several chunks on the prefill node."""
    goldens = sorted(load_goldens().goldens, key=lambda golden: len(golden.prompt_ids))
    return [*goldens[:2], next(golden for golden in goldens if len(golden.prompt_ids) > 128)]


def sampled_by_numpy(golden: Golden) -> tuple[int, ...]:
    """What the reference backend, in this process, draws after a golden's prompt."""
    engine = Engine.load(default_model_dir(), num_blocks=64, max_model_len=512)
    generation = Generation(engine, golden.prompt_ids, 0, Sampling(TEMPERATURE, seed=SEED))
    generate(engine, [generation], NUM_SAMPLED)
    return tuple(generation.output)


@pytest.mark.deep
@pytest.mark.e2e
@pytest.mark.asyncio
async def test_the_small_model_across_two_nodes_says_the_goldens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = some_goldens()[1]
    expected = sampled_by_numpy(drawn)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SITE), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    async with start_cluster(MODEL, tmp_path, prefill=(PREFILL,), decode=(DECODE,)) as cluster:
        for name in ("prefill0", "decode0"):
            assert (await cluster.node_state(name)).process.attention_backend == "triton"
        for golden in some_goldens():
            assert_golden(golden, await cluster.answer(prompt_of(golden), Options(max_tokens=MAX_NEW_TOKENS)))
        heat = Options(max_tokens=NUM_SAMPLED, temperature=TEMPERATURE, seed=SEED, ignore_eos=True)
        assert tuple((await cluster.answer(prompt_of(drawn), heat)).token_ids) == expected
        await cluster.leak_oracle()
