"""Every kernel but attention in the checked interpreter, on all pairs of its parameters."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.kernels import philox
from pdserve.kernels import wire_pack as reference_pack
from pdserve.kernels.kv_write import write_kv_reference
from pdserve.kernels.triton import gumbel_max, wire_pack
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.kv_quantize import quantize_reference, write_quantized_kv
from pdserve.kernels.triton.kv_write import write_kv
from pdserve.kernels.triton.rms_norm import rms_norm, rms_norm_reference
from pdserve.kernels.triton.rope import rotate, rotate_reference
from pdserve.kernels.triton.silu_mul import silu_mul, silu_mul_reference
from tests.kernels.triton.pairwise import all_pairs

Dims = tuple[int, int]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ONE_BYTE = (torch.int8, torch.float8_e4m3fn)
DIMS = ((64, 64), (80, 80), (72, 40), (5, 7), (5, 64), (256, 256), (1, 1))
HEADS = (1, 3, 5, 8, 9)
STEPS = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative: some float32 roundings, or one step of a 16-bit type (where the reference rounds to the other side)."""


def numbers(*shape: int, dtype: torch.dtype, is_packed: bool = False, seed: int = 0) -> Tensor:
    """Return random numbers; packed ones are columns of a wider tensor whose others are NaN."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if is_packed:
        wide = torch.full((*shape[:-2], shape[-2], 2 * shape[-1] + 1), float("nan"))
        if len(shape) > 2:
            wide = torch.full((shape[0], 2 * shape[1], shape[2]), float("nan"))
            wide[:, : shape[1]] = made
            return wide.to(dtype)[:, : shape[1]]
        wide[..., : shape[-1]] = made
        return wide.to(dtype)[..., : shape[-1]]
    return made.to(dtype)


def over(table: dict[str, Sequence[object]]) -> pytest.MarkDecorator:
    cases = all_pairs(table)
    assert len(cases) <= 40
    return pytest.mark.parametrize(list(table), [tuple(case.values()) for case in cases], ids=str)


def close(ours: Tensor, expected: Tensor) -> None:
    step = STEPS[ours.dtype]
    torch.testing.assert_close(ours, expected, atol=step / 4, rtol=step)


@over({"dims": DIMS, "heads": HEADS, "dtype": FLOATS, "num_tokens": (1, 3, 0), "is_packed": (False, True)})
def test_kv_write(dims: Dims, heads: int, dtype: torch.dtype, num_tokens: int, is_packed: bool) -> None:
    keys = numbers(num_tokens, heads, dims[0], dtype=dtype, is_packed=is_packed)
    values = numbers(num_tokens, heads, dims[1], dtype=dtype, is_packed=is_packed, seed=1)
    key_cache, value_cache = (torch.full((9, heads, dim), 7.0).to(dtype) for dim in dims)
    slots = torch.tensor([8, -1, 0][:num_tokens], dtype=torch.int64)
    live = slots >= 0
    expected = write_kv_reference(key_cache, value_cache, keys[live], values[live], slots[live])
    write_kv(key_cache, value_cache, keys, values, slots)
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


@over({"dims": DIMS, "heads": HEADS, "dtype": FLOATS, "storage": ONE_BYTE, "is_packed": (False, True)})
def test_quantized_kv_write(dims: Dims, heads: int, dtype: torch.dtype, storage: torch.dtype, is_packed: bool) -> None:
    keys = numbers(3, heads, dims[0], dtype=dtype, is_packed=is_packed)
    values = numbers(3, heads, dims[1], dtype=dtype, is_packed=is_packed, seed=1) * 50
    values[0, 0] = 0
    stored = [torch.full((9, heads, dim), 3.0).to(storage) for dim in dims]
    scales = [torch.full((9, heads), 5.0) for _ in range(2)]
    write_quantized_kv(
        PagedCache(stored[0], stored[1], 3, scales[0], scales[1]), keys, values, torch.tensor([8, -1, 0])
    )
    for cache, scale, new in zip(stored, scales, (keys, values), strict=True):
        expected, expected_scale = quantize_reference(new, storage)
        assert torch.equal(cache[[8, 0]].float(), expected[[0, 2]].float())
        assert torch.equal(scale[[8, 0]], expected_scale[[0, 2]])
        assert (cache[1:8].float() == 3).all() and (scale[1:8] == 5).all()


@over({"dims": DIMS, "heads": HEADS, "dtype": (*FLOATS, *ONE_BYTE), "num_layers": (1, 2), "num_tokens": (3, 1, 0)})
def test_wire_form(dims: Dims, heads: int, dtype: torch.dtype, num_layers: int, num_tokens: int) -> None:
    caches = [
        (numbers(9, heads, dims[0], dtype=dtype, seed=layer), numbers(9, heads, dims[1], dtype=dtype, seed=9 + layer))
        for layer in range(num_layers)
    ]
    slots = torch.tensor([8, 0, 5][:num_tokens], dtype=torch.int64)
    wire = reference_pack.pack_layers_reference(caches, slots)
    packed = bytearray(len(wire))
    wire_pack.pack_layers(caches, slots, memoryview(packed))
    assert bytes(packed) == wire
    targets = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in caches]
    wire_pack.unpack_layers(targets, slots, memoryview(packed))
    for pair, target in zip(caches, targets, strict=True):
        for source, copy in zip(pair, target, strict=True):
            assert torch.equal(source[slots].float(), copy[slots].float())
            assert copy.float().count_nonzero() == source[slots].float().count_nonzero()


@over(
    {
        "width": (1, 64, 77, 576, 2048),
        "dtype": FLOATS,
        "weights": FLOATS,
        "has_residual": (False, True),
        "unit_offset": (False, True),
        "is_packed": (False, True),
    }
)
def test_rms_norm(
    width: int, dtype: torch.dtype, weights: torch.dtype, has_residual: bool, unit_offset: bool, is_packed: bool
) -> None:
    x = numbers(3, width, dtype=dtype, is_packed=is_packed)
    weight = numbers(width, dtype=weights, seed=1)
    residual = numbers(3, width, dtype=dtype, is_packed=is_packed, seed=2) if has_residual else None
    expected, hidden = rms_norm_reference(x, weight, 1e-2, residual=residual, unit_offset=unit_offset)
    ours = rms_norm(x, weight, 1e-2, residual=residual, unit_offset=unit_offset)
    close(ours, expected)
    if dtype != torch.float32:  # that it rounds where transformers does shows in how many agree to the bit
        assert (ours != expected).float().mean() <= 0.02
    if residual is not None:
        assert torch.equal(residual, hidden)


@over(
    {
        "dims": ((64, 64), (80, 32), (8, 2), (10, 6), (128, 0)),
        "heads": HEADS,
        "dtype": FLOATS,
        "angles": FLOATS,
        "is_packed": (False, True),
    }
)
def test_rope(dims: Dims, heads: int, dtype: torch.dtype, angles: torch.dtype, is_packed: bool) -> None:
    """`dims`: of a head, and how many of them rotate."""
    x = numbers(3, heads, dims[0], dtype=dtype, is_packed=is_packed)
    cos, sin = numbers(3, dims[1], dtype=angles, seed=1), numbers(3, dims[1], dtype=angles, seed=2)
    expected = rotate_reference(x, cos, sin)
    rotate(x, cos, sin)
    close(x, expected)


@over({"width": (1, 64, 1023, 1024, 1025, 2500), "dtype": FLOATS, "is_packed": (False, True)})
def test_silu_mul(width: int, dtype: torch.dtype, is_packed: bool) -> None:
    gate = numbers(3, width, dtype=dtype, is_packed=is_packed) * 20
    up = numbers(3, width, dtype=dtype, is_packed=is_packed, seed=1)
    close(silu_mul(gate, up), silu_mul_reference(gate, up))


SEEDS = (0, 1, 2**31, 2**63 + 12345, 2**64 - 1)
POSITIONS = (0, 1, 2047, 2**31 - 1, 77)
SEQUENCES = (0, 1, 7, 0, 3)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    seeds = torch.from_numpy(np.array(SEEDS, np.uint64).view(np.int64))
    return seeds, torch.tensor(POSITIONS, dtype=torch.int32), torch.tensor(SEQUENCES, dtype=torch.int32)


@pytest.mark.parametrize("vocabulary", [1, 1000, 1024, 2500])
def test_noise_is_that_of_the_reference_bit_by_bit(vocabulary: int) -> None:
    ours = gumbel_max.uniform(*tensors(), vocabulary)
    for row, keys in enumerate(zip(SEEDS, POSITIONS, SEQUENCES, strict=True)):
        seed, position, sequence = keys
        assert np.array_equal(ours[row].numpy(), philox.uniform(seed, np.arange(vocabulary), position, sequence))


@pytest.mark.parametrize("vocabulary", [1, 1000, 2500])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 3.0])
@pytest.mark.parametrize("share_kept", [1.0, 0.02])
def test_draw(vocabulary: int, temperature: float, share_kept: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(len(SEEDS), vocabulary, generator=generator) * 2
    is_out = torch.rand(logits.shape, generator=generator) > share_kept
    logits[is_out & (logits < logits.amax(1, keepdim=True))] = -float("inf")
    temperatures = torch.full((len(SEEDS),), temperature, dtype=torch.float64)
    tokens = gumbel_max.draw(logits, temperatures, *tensors())
    for row, keys in enumerate(zip(SEEDS, POSITIONS, SEQUENCES, strict=True)):
        seed, position, sequence = keys
        z = (logits[row].double().numpy() - float(logits[row].max())) / temperature
        scores = z + philox.gumbel(seed, np.arange(vocabulary), position, sequence)
        assert tokens[row] == int(np.argmax(scores))


def test_the_lowest_id_of_equal_winners_is_drawn() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0]], dtype=torch.float64)
    ids, tokens = torch.tensor([[9, 8, 7, 6]], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    gumbel_max.choose_kernel[(1,)](values, ids, tokens, 4, PARTS_PAD=4)
    assert tokens.tolist() == [7]
