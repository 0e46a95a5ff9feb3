"""Paged attention in the checked interpreter, on all pairs of its parameters."""

import pytest

from pdserve.kernels.triton.paged_decode import paged_decode
from pdserve.kernels.triton.paged_prefill import paged_prefill
from tests.kernels.triton.attention_cases import DECODE, PREFILL, check_decode, check_prefill


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_decode(case: dict[str, object]) -> None:
    check_decode(case, paged_decode)


@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_prefill(case: dict[str, object]) -> None:
    check_prefill(case, paged_prefill)


def test_cases_are_few() -> None:
    assert len(DECODE) <= 40
    assert len(PREFILL) <= 40
