"""SmolLM2 through the Triton source: real router, prefill and decode processes, the wire between them, and the goldens' tokens.

The kernels are those that a GPU is given, at smaller tiles, lowered to x86 (`lowering`). Attention, KV write and wire form are
Triton's in both node processes.
"""

import os
from pathlib import Path

import pytest

from pdserve.client import Options
from tests.e2e.cluster import ROOT, start_cluster
from tests.e2e.test_smollm2 import MODEL, assert_golden, prompt_of
from tests.goldens.goldens import MAX_NEW_TOKENS, Golden, load_goldens
from tests.goldens.model import default_model_dir
from tests.kernels.native.lowering import reason_not_here

REASON = reason_not_here()
pytestmark = [pytest.mark.smollm2, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SITE = Path(__file__).with_name("site")
TRITON = ("--attention-backend", "triton")
PREFILL = (*TRITON, "--block-size", "16", "--kv-blocks", "128", "--token-budget", "64")
DECODE = (*TRITON, "--block-size", "32", "--kv-blocks", "64")


def some_goldens() -> list[Golden]:
    """One token, a short prompt, and the shortest that takes several chunks on the prefill node."""
    goldens = sorted(load_goldens().goldens, key=lambda golden: len(golden.prompt_ids))
    return [*goldens[:2], next(golden for golden in goldens if len(golden.prompt_ids) > 128)]


@pytest.mark.e2e
@pytest.mark.asyncio
async def test_the_small_model_across_two_nodes_says_the_goldens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_model_dir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SITE), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    async with start_cluster(MODEL, tmp_path, prefill=(PREFILL,), decode=(DECODE,)) as cluster:
        for name in ("prefill0", "decode0"):
            assert (await cluster.node_state(name)).process.attention_backend == "triton"
        for golden in some_goldens():
            assert_golden(golden, await cluster.answer(prompt_of(golden), Options(max_tokens=MAX_NEW_TOKENS)))
        await cluster.leak_oracle()
