"""The engine on the Triton backend: the torch backend's logits, whatever a step holds, and captured steps that are the same."""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pdserve.core.work import Sampling
from pdserve.engine.decode_graphs import DecodeGraphs, eagerly
from pdserve.engine.engine import Engine
from pdserve.engine.loading import LoadedModel
from pdserve.kernels.triton import gumbel_max
from tests.architectures.tiny import ARCHITECTURES, build
from tests.engine.small import Generation, generate, prompt_of
from tests.kernels.native.lowering import reason_not_here
from tests.kernels.native.on_cpu import triton_on_cpu

REASON = reason_not_here()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TOLERANCE = 2e-4


@pytest.fixture(autouse=True, scope="module")
def native() -> Iterator[None]:
    with triton_on_cpu():
        yield


def fresh_model(model_type: str) -> LoadedModel:
    """A model of the test's own: fusing changes it."""
    return build(next(tiny for tiny in ARCHITECTURES if tiny.model_type == model_type), seed=0)


def engine_of(model_type: str, backend: str) -> Engine:
    return Engine(
        fresh_model(model_type),
        dtype="float32",
        device="cpu",
        block_size=16,
        num_blocks=24,
        attention_backend=backend,
    )


@cache
def engine_pair(model_type: str) -> tuple[Engine, Engine]:
    return engine_of(model_type, "torch-sdpa"), engine_of(model_type, "triton")


def mixed_step(engine: Engine) -> Tensor:
    """Decode rows, a prompt's chunk and a whole prompt in one step, after steps that filled the pool."""
    generations = [Generation(engine, prompt_of(length, length), 6 * n) for n, length in enumerate((5, 19, 9, 30))]
    engine.step([generations[0].next_chunk(), generations[1].next_chunk(), generations[3].next_chunk(11)])
    for generation in generations[:2]:
        generation.output.append(7)
    return engine.logits([generation.next_chunk() for generation in generations])


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_mixed_step_gives_the_logits_of_the_torch_backend(model_type: str) -> None:
    plain, triton = engine_pair(model_type)
    assert (mixed_step(triton) - mixed_step(plain)).abs().max() < TOLERANCE


def test_what_is_fused_is_logged_by_type_and_what_is_not_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.kernels.triton_modules"):
        engine_of("llama", "triton")
        engine_of("gemma2", "triton")
    fused = [record.getMessage() for record in caplog.records]
    assert any("LlamaRMSNorm" in text and "LlamaMLP" in text and "LlamaAttention" in text for text in fused)
    assert any(text.startswith("not fused") and "Gemma2RMSNorm" in text for text in fused)


def test_sampled_tokens_are_those_of_the_torch_backend() -> None:
    """Drawn by the kernel where there are no filters, by NumPy where there are: the noise is the same."""
    kinds = (Sampling(1.0, seed=3), Sampling(0.9, top_p=0.8, seed=2**64 - 1), Sampling(1.3, seed=5), Sampling())
    engines, outputs = engine_pair("llama"), []
    with mock.patch.object(gumbel_max, "draw", wraps=gumbel_max.draw) as on_device:
        for engine in engines:
            generations = [
                Generation(engine, prompt_of(5 + 4 * n, n), 6 * n, sampling) for n, sampling in enumerate(kinds)
            ]
            generate(engine, generations, 12)
            outputs.append([generation.output for generation in generations])
    assert outputs[0] == outputs[1]
    assert [call.args[0].shape[0] for call in on_device.call_args_list] == [2] * 12


def test_captured_decode_steps_say_the_same_tokens() -> None:
    """With `eagerly` in the place of a CUDA graph: padding to buckets, static inputs and refilled plans."""
    plain, triton = engine_pair("llama")
    forward: Any = triton._forward
    graphs = DecodeGraphs(forward._module, triton._pool, forward._backend, torch.device("cpu"), 64, eagerly)
    answers = []
    for engine in (plain, triton):
        forward._graphs = graphs if engine is triton else None
        generations = [Generation(engine, prompt_of(length, length), 6 * n) for n, length in enumerate((3, 17, 9))]
        generate(engine, generations, 6)
        generate(engine, generations[:2], 9)
        answers.append([generation.output for generation in generations])
    forward._graphs = None
    assert answers[0] == answers[1]
    assert graphs.num_buckets == 2, "three rows in a bucket of four, then two in one of two"
