"""Every served architecture through both engines and the wire gives the tokens and logits of plain transformers.

And the comparison is worth something: with attention zeroed, or the window, cap or sinks ignored, the same comparison fails.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.families import FAMILIES
from pdserve.engine.loading import LoadedModel
from pdserve.kernels.backends import BACKENDS
from tests.architectures.disaggregated import disagreement
from tests.architectures.reference import Reference, model_with_reference
from tests.architectures.tiny import ARCHITECTURES, Tiny

BACKEND = "torch-sdpa"
NATIVE = [tiny for tiny in ARCHITECTURES if tiny.model_type in FAMILIES]
FAULTY = [(tiny, fault) for tiny in ARCHITECTURES for fault in ("attention", *tiny.faults)]


@cache
def prepared(model_type: str) -> tuple[LoadedModel, Reference]:
    return model_with_reference(next(tiny for tiny in ARCHITECTURES if tiny.model_type == model_type))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("tiny", ARCHITECTURES, ids=lambda tiny: tiny.model_type)
def test_tokens_and_logits_are_those_of_transformers(tiny: Tiny) -> None:
    assert disagreement(*prepared(tiny.model_type)) is None


@pytest.mark.parametrize("tiny", NATIVE, ids=lambda tiny: tiny.model_type)
def test_without_native_operations_they_are_the_same(tiny: Tiny) -> None:
    assert disagreement(*prepared(tiny.model_type), BACKEND) is None


@pytest.mark.parametrize(("tiny", "fault"), FAULTY, ids=[f"{tiny.model_type}-{fault}" for tiny, fault in FAULTY])
def test_comparison_turns_red_without(tiny: Tiny, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS[BACKEND]
    monkeypatch.setitem(BACKENDS, BACKEND, replace(backend, attend=ignoring(fault, backend.attend)))
    assert disagreement(*prepared(tiny.model_type), BACKEND) is not None


def ignoring(fault: str, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention that leaves something out: itself, or the argument of that name."""

    def faulty(*tensors: Any, **arguments: Any) -> Tensor:
        if fault != "attention":
            arguments[fault] = None
        answer = attend(*tensors, **arguments)
        return torch.zeros_like(answer) if fault == "attention" else answer

    return faulty
