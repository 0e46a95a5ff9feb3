"""KV in 8 bits: the formula's bytes, the errors it promises, and what is refused."""

import pytest
import torch

from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.kernels.wire_quant import (
    WIRE_NUMBERS,
    dequantize,
    dequantize_wire,
    quantize,
    quantize_int8_reference,
    quantize_wire,
)

LAYERS = (LayerLayout(3, 8, 8), LayerLayout(1, 16, 5), LayerLayout(2, 7, 3))
"""Odd sizes: scales lie at odd addresses."""


def vectors_of(rows: int, dim: int) -> torch.Tensor:
    """Vectors of very different lengths: an outlier in one must not cost another its precision."""
    generator = torch.Generator().manual_seed(5)
    vectors = torch.randn(rows, dim, generator=generator)
    return vectors * torch.logspace(-6, 4, rows).unsqueeze(1)


def test_int8_is_the_formula_s_bytes() -> None:
    vectors = torch.cat([vectors_of(40, 16), torch.zeros(1, 16), torch.full((1, 16), -3.0)])
    scales, numbers = quantize(vectors, WIRE_NUMBERS["int8"])
    for row, vector in enumerate(vectors.tolist()):
        made = scales[row].numpy().tobytes() + numbers[row].numpy().tobytes()
        assert made == quantize_int8_reference(vector), row


def test_an_int8_differs_by_half_a_scale_at_most() -> None:
    vectors = vectors_of(64, 64)
    scales, numbers = quantize(vectors, WIRE_NUMBERS["int8"])
    errors = (dequantize(scales, numbers) - vectors).abs()
    assert bool((errors <= scales.unsqueeze(1) * 0.5001).all())
    assert bool((errors.amax(dim=1) > scales * 0.25).all()), "better than 8 bits can be: another formula"


def test_a_float8_differs_by_a_sixteenth_at_most() -> None:
    vectors = vectors_of(64, 64)
    scales, numbers = quantize(vectors, WIRE_NUMBERS["float8_e4m3"])
    errors = (dequantize(scales, numbers) - vectors).abs()
    bound = torch.maximum(vectors.abs() * 2**-4, scales.unsqueeze(1) * 2**-10)
    assert bool((errors <= bound * 1.0001).all())


@pytest.mark.parametrize("small", ["int8", "float8_e4m3"])
def test_the_largest_number_stays_finite(small: str) -> None:
    """Rounding beyond float8's largest number gives NaN."""
    vectors = vectors_of(2000, 8)
    restored = dequantize(*quantize(vectors, WIRE_NUMBERS[small]))
    assert bool(restored.isfinite().all())
    assert bool(torch.equal(dequantize(*quantize(torch.zeros(3, 4), WIRE_NUMBERS[small])), torch.zeros(3, 4)))


@pytest.mark.parametrize("small", ["int8", "float8_e4m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_there_and_back(small: str, dtype: str, num_tokens: int) -> None:
    layout, layers = KvLayout(LAYERS, dtype), range(1, 3)
    exact = torch.float32 if dtype == "float32" else getattr(torch, dtype)
    values = torch.randn(layout.range_bytes(layers, num_tokens) // layout.itemsize).to(exact)
    plain = bytes(values.view(torch.uint8).numpy())
    room = bytearray(b"\xaa" * (layout.on_wire(small).range_bytes(layers, num_tokens) + 2))
    quantize_wire(memoryview(plain), layout, layers, num_tokens, small, memoryview(room)[1:-1])
    assert room[0] == room[-1] == 0xAA
    back = bytearray(len(plain))
    dequantize_wire(memoryview(bytes(room[1:-1])), layout, layers, num_tokens, small, memoryview(back))
    restored = torch.frombuffer(back, dtype=exact).float()
    assert float((restored - values.float()).abs().max()) < (0.03 if small == "int8" else 0.3)
    assert not torch.equal(restored, values.float())


def test_an_outlier_costs_only_its_own_head() -> None:
    layout = KvLayout((LayerLayout(2, 4, 4),), "float32")
    values = torch.full((1, 2 * 8), 0.5)
    values[0, 0] = 1e6
    small, back = bytearray(layout.on_wire("int8").token_bytes), bytearray(layout.token_bytes)
    quantize_wire(memoryview(bytes(values.numpy())), layout, range(1), 1, "int8", memoryview(small))
    dequantize_wire(memoryview(small), layout, range(1), 1, "int8", memoryview(back))
    restored = torch.frombuffer(back, dtype=torch.float32)
    assert torch.allclose(restored[4:], torch.full((12,), 0.5), rtol=1e-6)


def test_what_is_refused() -> None:
    layout = KvLayout((LayerLayout(2, 4, 4),), "float32")
    plain, small = bytearray(layout.token_bytes), bytearray(layout.on_wire("int8").token_bytes)
    for wrong in ((plain, small[:-1]), (plain[:-4], small), (plain * 2, small)):
        with pytest.raises(ValueError, match="must be 64 and"):
            quantize_wire(memoryview(wrong[0]), layout, range(1), 1, "int8", memoryview(wrong[1]))
        with pytest.raises(ValueError, match="must be 64 and"):
            dequantize_wire(memoryview(wrong[1]), layout, range(1), 1, "int8", memoryview(wrong[0]))
    for poison in (float("nan"), float("inf")):
        values = torch.zeros(16)
        values[3] = poison
        with pytest.raises(ValueError, match="not finite"):
            quantize_wire(memoryview(bytes(values.numpy())), layout, range(1), 1, "int8", memoryview(small))


@pytest.mark.parametrize(("small", "largest"), [("int8", 127.0), ("float8_e4m3", 448.0)])
def test_the_largest_element_takes_the_largest_number(small: str, largest: float) -> None:
    _, numbers = quantize(vectors_of(50, 16), WIRE_NUMBERS[small])
    assert set(numbers.float().abs().amax(dim=1).tolist()) == {largest}


def test_the_wire_form_is_scales_then_numbers_of_keys_then_of_values() -> None:
    """Keys and values of different sizes: both sides could agree on a wrong order, which only the bytes show."""
    layout, num_tokens = KvLayout((LayerLayout(2, 3, 5), LayerLayout(1, 6, 2)), "float32"), 2
    plain, expected = b"", b""
    for layer in layout.layers:
        for dim in (layer.key_dim, layer.value_dim):
            vectors = torch.randn(num_tokens * layer.num_kv_heads, dim)
            plain += bytes(vectors.numpy())
            made = [quantize_int8_reference(vector) for vector in vectors.tolist()]
            expected += b"".join(each[:4] for each in made) + b"".join(each[4:] for each in made)
    small = bytearray(len(expected))
    quantize_wire(memoryview(plain), layout, range(2), num_tokens, "int8", memoryview(small))
    assert bytes(small) == expected
