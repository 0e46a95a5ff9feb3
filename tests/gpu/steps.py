"""A model of the shape of Llama 8B with random weights, made on the device: decode and prefill steps against the roofline.

Decode must read all weights and all KV: its bound is a copy's rate. Prefill must multiply: its bound is a bf16 matrix product's.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pdserve.core.work import Sampling
from pdserve.engine.attention import ATTENTION_NAME
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.decode_graphs import DecodeGraphs, eagerly
from pdserve.engine.engine import Engine
from pdserve.engine.loading import LoadedModel
from pdserve.engine.quiet import quieten_transformers
from pdserve.kernels.logits import SampledRow
from tests.engine.small import GREEDY
from tests.gpu.measure import Yardstick

LAYERS, HIDDEN, INNER, VOCABULARY = 32, 4096, 14336, 128256
BLOCK = 16
BATCH, CONTEXT = 32, 2048
PROMPT = 8192
STEPS = 20
DECODE_TARGET, PREFILL_TARGET = 0.8, 0.5


def large_engine(device: torch.device, scale: int = 1) -> Engine:
    """Return an engine of that shape in bf16 (`scale` divides it, for a dry run)."""
    quieten_transformers()
    config = LlamaConfig(
        hidden_size=HIDDEN // scale,
        intermediate_size=INNER // scale,
        num_hidden_layers=max(1, LAYERS // scale),
        num_attention_heads=32 // scale,
        num_key_value_heads=max(1, 8 // scale),
        vocab_size=VOCABULARY // scale,
        max_position_embeddings=2 * PROMPT,
    )
    factory: Any = AutoModelForCausalLM
    with torch.device(device):
        module = factory.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16).eval()
    model = LoadedModel(
        *(module, config, "llama", "random", "", frozenset()), VOCABULARY // scale, config.num_hidden_layers
    )
    blocks = max(BATCH * (CONTEXT // BLOCK + 2), PROMPT // BLOCK) // scale + 2
    return Engine(
        model,
        dtype="bfloat16",
        device=str(device),
        block_size=BLOCK,
        num_blocks=blocks,
        attention_backend="triton",
    )


def measure_steps(device: torch.device, best: Yardstick, scale: int = 1) -> Iterator[str]:
    """Yield a line per kind of step; `scale` divides all sizes."""
    engine = large_engine(device, scale)
    forward: Any = engine._forward
    module = forward._module
    weights = sum(p.numel() for name, p in module.named_parameters() if "embed_tokens" not in name)
    yield _graphs_agree(engine)
    yield from _decode(engine, best, weights, BATCH, CONTEXT // scale)
    # A prompt's step computes the logits of its last row alone.
    products = weights - module.lm_head.weight.numel()
    yield _prefill(engine, best, products, PROMPT // scale, module.config.num_attention_heads)


def _chunks(batch: int, position: int, width: int, sampling: Sampling = GREEDY) -> list[SequenceChunk]:
    return [
        SequenceChunk(
            *((7 + row,), position, range(row * width, (row + 1) * width)), (SampledRow(sampling, 0, position),)
        )
        for row in range(batch)
    ]


def _decode(engine: Engine, best: Yardstick, weights: int, batch: int, context: int) -> Iterator[str]:
    width = engine.num_blocks // batch
    position = min(context, width * BLOCK) - 1
    chunks, drawn = (_chunks(batch, position, width, how) for how in (GREEDY, Sampling(1.0, seed=3)))
    moved = 2 * weights + engine.layout.token_bytes * batch * (chunks[0].start + 1)
    forward: Any = engine._forward
    graphs = forward._graphs
    kinds: tuple[tuple[str, DecodeGraphs | None, Callable[[], object]], ...] = (
        ("captured", graphs, lambda: engine.logits(chunks)),
        ("captured, with greedy tokens", graphs, lambda: engine.step(chunks)),
        ("captured, with drawn tokens", graphs, lambda: engine.step(drawn)),
        ("launch by launch", None, lambda: engine.logits(chunks)),
    )
    for name, used, call in kinds:
        forward._graphs = used
        took = _step_seconds(call, engine.device)
        share = moved / best.copy_rate / took
        verdict = "meets" if share >= DECODE_TARGET else "BELOW"
        yield (
            f"decode step {batch} x {context}, {name}: {took * 1e3:.2f} ms, {share:.0%} of the roofline ({verdict} 80 %)"
        )
    forward._graphs = graphs


def _prefill(engine: Engine, best: Yardstick, weights: int, length: int, heads: int) -> str:
    blocks = range(-(-length // BLOCK))
    chunk = SequenceChunk(tuple(n % engine.vocab_size for n in range(length)), 0, blocks, (SampledRow(GREEDY, 0, 0),))
    took = _step_seconds(lambda: engine.logits([chunk]), engine.device)
    shape = engine.layout.layers[0]
    # Products with the weights, and of attention the causal half of both.
    attention = 2 * heads * (shape.key_dim + shape.value_dim) * length * length / 2 * len(engine.layout.layers)
    share = (2 * weights * length + attention) / best.product_rate / took
    verdict = "meets" if share >= PREFILL_TARGET else "BELOW"
    return f"prefill step of {length}: {took * 1e3:.1f} ms, {share:.0%} of the roofline ({verdict} 50 %)"


def _graphs_agree(engine: Engine) -> str:
    """Compare a captured step with the same step computed launch by launch."""
    chunks = _chunks(3, 5, engine.num_blocks // 3)
    forward: Any = engine._forward
    graphs = forward._graphs
    if graphs is None or graphs._capture is eagerly:
        return "graph capture: not on this device"
    captured = engine.logits(chunks)
    forward._graphs = None
    plain = engine.logits(chunks)
    forward._graphs = graphs
    error = float((captured - plain).abs().max())
    return f"{'ok' if error <= 0.05 * float(plain.abs().max()) else 'WRONG'}: graph capture: largest difference {error:.2g}"


def _step_seconds(call: Callable[[], object], device: str) -> float:
    """Return the median wall time of a step, the host's part included."""
    times = []
    for _ in range(STEPS if device.startswith("cuda") else 1):
        began_s = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return sorted(times)[len(times) // 2]
