"""The operations that replace modules, one-byte caches and the draw, run natively at models' shapes against their references."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdserve.kernels.philox import uniform as philox_uniform
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.gumbel_max import uniform
from pdserve.kernels.triton.kv_quantize import quantize_reference, write_quantized_kv
from pdserve.kernels.triton.rms_norm import rms_norm, rms_norm_reference
from pdserve.kernels.triton.rope import rotate, rotate_reference
from pdserve.kernels.triton.silu_mul import silu_mul, silu_mul_reference
from tests.kernels.native.lowering import reason_not_here
from tests.kernels.native.on_cpu import triton_on_cpu

REASON = reason_not_here()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2}


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
    width = 576 if dtype == torch.float32 else 192  # bfloat16 takes LLVM minutes at 1024 columns
    x, residual, weight = (random(*size, dtype=dtype, seed=len(size)) for size in ((5, width), (5, width), (width,)))
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
    gate, up = (random(5, 1536 if dtype == torch.float32 else 200, dtype=dtype, seed=seed) for seed in (1, 2))
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
    found = uniform(
        seeds, positions.int(), sequences.int(), 60
    )  # one program of 64 candidates: more take minutes to compile
    ids = np.arange(60)
    for row, (seed, position, sequence) in enumerate(rows):
        expected = philox_uniform(seed, ids, position, sequence)
        assert np.array_equal(found[row].numpy(), expected.astype(np.float32))
