"""The native forward pass: which models have it, that a wrong one is not taken, that neighbours change no bit of an answer."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pdserve.engine import native_model
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.engine.families import FAMILIES
from pdserve.engine.native_model import NativeForward
from pdserve.kernels.native.library import native_library
from pdserve.kernels.native.tape import AttentionLayer
from tests.architectures.tiny import ARCHITECTURES, build
from tests.engine.small import GREEDY_ROW, model_of, prompt_logits, prompt_of, small_engine

pytestmark = pytest.mark.skipif(native_library() is None, reason="no native operations were built: no C compiler")

KNOWN = [tiny.model_type for tiny in ARCHITECTURES if tiny.model_type in FAMILIES]
DTYPES = ["float32", "bfloat16", "float16"]


def engine_of(model_type: str, dtype: str = "float32", threads: int = 1) -> Engine:
    model = build(next(tiny for tiny in ARCHITECTURES if tiny.model_type == model_type), seed=0)
    model.module.to(getattr(torch, dtype))
    return Engine(model, dtype=dtype, device="cpu", block_size=4, num_blocks=40, threads=threads)


def test_every_known_family_is_tested() -> None:
    assert set(KNOWN) == set(FAMILIES)


@pytest.mark.parametrize("model_type", KNOWN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_known_architecture_is_computed_natively(
    model_type: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pdserve.engine.forwards"):
        engine = engine_of(model_type, dtype)
    assert engine.forward_pass == "native"
    assert "native forward pass" in caplog.text


def test_another_is_computed_by_transformers_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.engine.forwards"):
        engine = small_engine("gpt2")
    assert engine.forward_pass == "transformers"
    assert "no native forward pass for gpt2: model type gpt2 is not among" in caplog.text


class Odd(nn.Linear):
    """A layer that may compute something else."""


def test_a_layer_of_another_kind_is_left_to_transformers(caplog: pytest.LogCaptureFixture) -> None:
    model = build(ARCHITECTURES[0], seed=0)
    module: Any = model.module
    module.model.layers[1].mlp.up_proj.__class__ = Odd
    with caplog.at_level(logging.INFO, "pdserve.engine.forwards"):
        engine = Engine(model, dtype="float32", device="cpu", block_size=4, num_blocks=40)
    assert engine.forward_pass == "transformers"
    assert "a linear layer of type Odd" in caplog.text


def without(**left_out: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault: attention without its window, cap or sinks."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def faulty(*arguments: Any) -> AttentionLayer:
            return replace(AttentionLayer(*arguments), **left_out)

        patch.setattr(native_model, "AttentionLayer", faulty)

    return plant


def misread(**wrong: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault: a family's code was misread."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for name, family in FAMILIES.items():
            patch.setitem(FAMILIES, name, replace(family, **wrong))

    return plant


@pytest.mark.parametrize(
    ("model_type", "plant"),
    [
        ("qwen3", without(window=None)),
        ("gemma2", without(softcap=None)),
        ("llama", without(scaling=0.3)),
        ("gemma", misread(norm_offset=0.0)),
        ("gemma3_text", misread(embed_factor=lambda _: 1.0)),
        ("llama", misread(is_interleaved=True)),
    ],
    ids=["window", "cap", "scaling", "norm", "embedding", "rotation"],
)
def test_a_native_pass_that_differs_is_not_taken(
    model_type: str, plant: Callable[[pytest.MonkeyPatch], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = prompt_logits(small_engine(model_type, backend="torch-sdpa"), prompt_of(30), 30)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        engine = small_engine(model_type)
    assert engine.forward_pass == "transformers"
    assert "differ from those of transformers" in caplog.text
    torch.testing.assert_close(prompt_logits(engine, prompt_of(30), 30), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_a_row_gets_the_same_bits_in_any_cut_and_beside_any_others(model_type: str, dtype: str, threads: int) -> None:
    engine, prompt = engine_of(model_type, dtype, threads), prompt_of(40)
    alone = prompt_logits(engine, prompt, 40)
    for budget in (1, 3, 17):
        assert torch.equal(prompt_logits(engine, prompt, budget, first_block=12), alone)
    neighbour = SequenceChunk(prompt_of(23, 5), 0, list(range(30, 36)), GREEDY_ROW)
    chunk = SequenceChunk(prompt, 0, list(range(12)), GREEDY_ROW)
    assert torch.equal(engine.logits([neighbour, chunk])[1], alone)
    assert torch.equal(engine_of(model_type, dtype).logits([chunk])[0], alone)


def test_the_module_is_not_kept() -> None:
    model = model_of("llama")
    engine = Engine(model, dtype="float32", device="cpu", block_size=4, num_blocks=4)
    assert isinstance(engine._forward, NativeForward)
    assert not any(value is model.module for value in reachable(engine._forward))


def reachable(root: object) -> list[object]:
    """Return what an object holds, through attributes and containers."""
    seen, waiting = dict[int, object](), [root]
    while waiting:
        here = waiting.pop()
        if id(here) in seen or isinstance(here, type):
            continue
        seen[id(here)] = here
        if isinstance(here, dict):
            waiting += here.values()
        elif isinstance(here, list | tuple):
            waiting += here
        elif hasattr(here, "__dict__"):
            waiting += vars(here).values()
    return list(seen.values())
