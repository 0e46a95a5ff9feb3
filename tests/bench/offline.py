"""Decode tokens per second of the engine alone, beside plain `transformers` in the same run."""

import time
from typing import Any

import torch

from pdserve.core.models import DEFAULT_MODEL, resolve_model_dir
from pdserve.core.work import Sampling
from pdserve.engine.batch import Chosen, SequenceChunk, StepResult
from pdserve.engine.blocks import BlockPool
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import SampledRow

CONTEXT = 256
STEPS = 32
WARM_UP = 4


def decode_rates(batches: tuple[int, ...] = (1, 8, 32)) -> list[dict[str, object]]:
    """Measure each batch size: our engine, then `transformers`, one engine thread, greedy, context 256."""
    rows: list[dict[str, object]] = []
    for batch in batches:
        ours = _ours(batch)
        theirs = _theirs(batch)
        rows.append(
            {
                "batch": batch,
                "pdserve_tokens_per_s": round(ours, 1),
                "transformers_tokens_per_s": round(theirs, 1),
                "ratio": round(ours / theirs, 2),
            }
        )
    return rows


def _ours(batch: int) -> float:
    blocks = batch * (CONTEXT + STEPS + WARM_UP + 16) // 16 + batch
    engine = Engine.load(resolve_model_dir(DEFAULT_MODEL), dtype="float32", threads=1, block_size=16, num_blocks=blocks)
    pool = BlockPool(blocks)
    leases = [pool.lease((CONTEXT + STEPS + WARM_UP) // 16 + 1, str(n)) for n in range(batch)]
    prompts = [tuple((7 * i + n) % 40_000 + 100 for i in range(CONTEXT)) for n in range(batch)]
    last: list[int] = []
    for prompt, lease in zip(prompts, leases, strict=True):
        last += _tokens(engine.step([SequenceChunk(prompt, 0, lease.block_ids, (SampledRow(Sampling(), 0, 0),))]))
    began_s = 0.0
    for step in range(STEPS + WARM_UP):
        if step == WARM_UP:
            began_s = time.perf_counter()
        chunks = [
            SequenceChunk((token,), CONTEXT + step, lease.block_ids, (SampledRow(Sampling(), 0, step + 1),))
            for token, lease in zip(last, leases, strict=True)
        ]
        last = _tokens(engine.step(chunks))
    return batch * STEPS / (time.perf_counter() - began_s)


def _tokens(result: StepResult) -> list[int]:
    return [choice.token_id for chunk in result.chunks for choice in chunk.choices if isinstance(choice, Chosen)]


@torch.inference_mode()
def _theirs(batch: int) -> float:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model_dir(DEFAULT_MODEL), dtype=torch.float32)
    model.eval()
    ids = torch.tensor([[(7 * i + n) % 40_000 + 100 for i in range(CONTEXT)] for n in range(batch)])
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    began_s = 0.0
    for step in range(STEPS + WARM_UP):
        if step == WARM_UP:
            began_s = time.perf_counter()
        out = model(input_ids=out.logits[:, -1].argmax(-1, keepdim=True), past_key_values=out.past_key_values)
    return batch * STEPS / (time.perf_counter() - began_s)
