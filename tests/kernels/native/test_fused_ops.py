"""The operations that replace modules, one-byte caches and the draw, run natively at models' shapes against their references."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdserve.core.work import Sampling
from pdserve.kernels.gumbel_max import draw
from pdserve.kernels.logits import Chosen, RowFailed, SampledRow
from pdserve.kernels.philox import uniform as philox_uniform
from pdserve.kernels.sampling import sample
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.gumbel_max import uniform
from pdserve.kernels.triton.kv_quantize import quantize_reference, write_quantized_kv
from pdserve.kernels.triton.rms_norm import rms_norm, rms_norm_reference
from pdserve.kernels.triton.rope import rotate, rotate_reference
from pdserve.kernels.triton.silu_mul import silu_mul, silu_mul_reference
from pdserve.kernels.triton_backend import draw_rows
from tests.kernels.native.lowering import reason_not_here
from tests.kernels.native.on_cpu import triton_on_cpu

REASON = reason_not_here()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2}
VOCABULARY = 49152


@pytest.fixture(autouse=True, scope="module")
def native() -> Iterator[None]:
    with triton_on_cpu():
        yield


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert (found.float() - expected.float()).abs().max() <= TOLERANCE[found.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_with_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (random(*size, dtype=dtype, seed=len(size)) for size in ((5, 576), (5, 576), (576,)))
    expected, stream = rms_norm_reference(x, weight, 1e-5, residual=residual)
    assert_close(rms_norm(x, weight, 1e-5, residual=residual), expected)
    assert_close(residual, stream)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation(dtype: torch.dtype) -> None:
    heads_first = random(9, 7, 64, dtype=dtype)
    x = heads_first.transpose(0, 1)  # as a model hands it over
    angles = torch.rand(7, 32, generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = rotate_reference(x, cos, sin)
    rotate(x, cos, sin)
    assert_close(x, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate(dtype: torch.dtype) -> None:
    gate, up = (random(5, 1536, dtype=dtype, seed=seed) for seed in (1, 2))
    assert_close(silu_mul(gate, up), silu_mul_reference(gate, up))


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_write_into_one_byte(stored: torch.dtype) -> None:
    keys, values = (random(6, 3, 64, dtype=torch.float32, seed=seed) for seed in (1, 2))
    slots = torch.tensor([9, 0, 30, 17, 2, 31])
    numbers, scales = torch.zeros(2, 32, 3, 64, dtype=stored), torch.zeros(2, 32, 3)
    cache = PagedCache(numbers[0], numbers[1], 16, scales[0], scales[1])
    write_quantized_kv(cache, keys, values, slots)
    for new, found, found_scales in (
        (keys, cache.keys, cache.key_scales),
        (values, cache.values, cache.value_scales),
    ):
        expected, expected_scales = quantize_reference(new, stored)
        assert found_scales is not None
        assert torch.allclose(found_scales[slots], expected_scales)
        assert (found.view(torch.uint8)[slots] == expected.view(torch.uint8)).float().mean() > 0.99


def test_uniforms_are_philox_bit_by_bit() -> None:
    rows = [(7, 3, 0), (2**63 - 5, 4000, 2)]
    seeds, positions, sequences = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = uniform(seeds, positions.int(), sequences.int(), VOCABULARY)
    for row, (seed, position, sequence) in enumerate(rows):
        assert np.array_equal(found[row].numpy(), philox_uniform(seed, np.arange(VOCABULARY), position, sequence))


def test_what_the_backend_draws_is_what_the_host_draws() -> None:
    """At the vocabulary and the tile of the product; some ids forbidden, as processors leave them; extreme seeds and heat."""
    logits = random(6, VOCABULARY, dtype=torch.float32) * 3
    logits[2:4, torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(9)) < 0.999] = float("-inf")
    heats = (1.0, 0.3, 1.5, 1e-45, 40.0, 0.8)
    rows = [
        SampledRow(Sampling(heat, seed=2**64 - 1 - index if index % 2 else index), index % 3, 999 * index)
        for index, heat in enumerate(heats)
    ]
    assert draw_rows(logits, rows).tolist() == draw(list(logits.numpy()), rows)


def test_a_row_without_a_maximum_spoils_no_other() -> None:
    logits = random(3, VOCABULARY, dtype=torch.float32)
    rows = [SampledRow(Sampling(1.0, seed=4), 0, position) for position in range(3)]
    expected = draw_rows(logits, rows)
    logits[1, 77] = float("nan")
    answers = sample(logits, rows, draw_rows)
    assert isinstance(answers[1], RowFailed)
    assert [answer.token_id for answer in answers if isinstance(answer, Chosen)] == expected[[0, 2]].tolist()
