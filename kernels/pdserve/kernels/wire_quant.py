"""A smaller wire form: each head's vector of each token as 8-bit numbers with a scale of its own.

    scale = max |x| / Q        q = round(x / scale)        x' = q · scale

over the last dimension, with Q = 127 for int8 and 448, the largest finite number, for float8_e4m3; a vector of zeros has scale 0.
For int8, |x - x'| ≤ scale / 2; for float8_e4m3 it is at most 2⁻⁴ of |x|, or 2⁻¹⁰ of the scale for the smallest.

    wire = for each layer: scales of K [token, kv_head] float32, K [token, kv_head, key_dim], then the same of V

contiguous, little-endian. `core.layout.KvLayout` with one of these dtypes knows the sizes.
"""

import math
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.layout import SCALE_BYTES, KvLayout


@dataclass(frozen=True, slots=True)
class WireNumber:
    """An 8-bit number format: what torch calls it, and its largest value."""

    dtype: torch.dtype
    largest: float


# Payloads are read-only buffers, and are only read here: see `wire_pack`.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)

WIRE_NUMBERS = {"int8": WireNumber(torch.int8, 127.0), "float8_e4m3": WireNumber(torch.float8_e4m3fn, 448.0)}
_CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def quantize(vectors: Tensor, number: WireNumber) -> tuple[Tensor, Tensor]:
    """Return scales [rows] float32 and numbers [rows, dim] of `vectors` [rows, dim]; ValueError for what is not finite."""
    exact = vectors.to(torch.float32)
    scales = exact.abs().amax(dim=1) / number.largest
    if not bool(scales.isfinite().all()):
        raise ValueError("KV that is not finite cannot be sent in 8 bits")
    scaled = exact / torch.where(scales > 0, scales, torch.ones(())).unsqueeze(1)
    if not number.dtype.is_floating_point:
        scaled = scaled.round_()
    # Dividing may round up beyond the largest number, which float8 would turn into NaN.
    return scales, scaled.clamp_(-number.largest, number.largest).to(number.dtype)


def dequantize(scales: Tensor, numbers: Tensor) -> Tensor:
    """Return `numbers` [rows, dim] times their `scales` [rows], float32."""
    return numbers.to(torch.float32) * scales.unsqueeze(1)


def quantize_wire(
    plain: memoryview, layout: KvLayout, layers: range, num_tokens: int, small: str, into: memoryview
) -> None:
    """Write the `small` form of `plain`, the wire form of `num_tokens` tokens of `layers` in `layout.dtype`, into `into`.

    Raises ValueError if a size is wrong or a value is not finite.
    """
    number, source, target = WIRE_NUMBERS[small], _bytes_of(plain), _bytes_of(into)
    for plain_at, small_at in _places(layout, layers, num_tokens, small, len(plain), len(into)):
        vectors = source[plain_at.start : plain_at.stop].view(_CACHE_DTYPES[layout.dtype]).view(-1, small_at.dim)
        scales, numbers = quantize(vectors, number)
        middle = small_at.start + len(scales) * SCALE_BYTES
        target[small_at.start : middle] = scales.view(torch.uint8)
        target[middle : small_at.stop] = numbers.view(torch.uint8).flatten()


def dequantize_wire(
    payload: memoryview, layout: KvLayout, layers: range, num_tokens: int, small: str, into: memoryview
) -> None:
    """Write the plain wire form, in `layout.dtype`, of a payload that `quantize_wire` made into `into`.

    Raises ValueError if a size is wrong.
    """
    number, source, target = WIRE_NUMBERS[small], _bytes_of(payload), _bytes_of(into)
    for plain_at, small_at in _places(layout, layers, num_tokens, small, len(into), len(payload)):
        rows = (small_at.stop - small_at.start) // (SCALE_BYTES + small_at.dim)
        middle = small_at.start + rows * SCALE_BYTES
        # A copy, because the scales may lie at any address.
        scales = source[small_at.start : middle].clone().view(torch.float32)
        numbers = source[middle : small_at.stop].view(number.dtype).view(rows, small_at.dim)
        plain = dequantize(scales, numbers).to(_CACHE_DTYPES[layout.dtype])
        target[plain_at.start : plain_at.stop] = plain.view(torch.uint8).flatten()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the vectors of K or V of one layer lie; `dim` elements each."""

    start: int
    stop: int
    dim: int


def _places(
    layout: KvLayout, layers: range, num_tokens: int, small: str, plain_bytes: int, small_bytes: int
) -> Iterator[tuple[_Place, _Place]]:
    """Yield where K, then V, of each layer lie in the plain and in the small form."""
    wanted = (layout.range_bytes(layers, num_tokens), layout.on_wire(small).range_bytes(layers, num_tokens))
    if (plain_bytes, small_bytes) != wanted:
        raise ValueError(f"wire forms of {plain_bytes} and {small_bytes} bytes, must be {wanted[0]} and {wanted[1]}")
    plain_at = small_at = 0
    for layer in layers:
        shape = layout.layers[layer]
        rows = num_tokens * shape.num_kv_heads
        for dim in (shape.key_dim, shape.value_dim):
            plain_stop, small_stop = plain_at + rows * dim * layout.itemsize, small_at + rows * (SCALE_BYTES + dim)
            yield _Place(plain_at, plain_stop, dim), _Place(small_at, small_stop, dim)
            plain_at, small_at = plain_stop, small_stop


def _bytes_of(buffer: memoryview) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def quantize_int8_reference(values: list[float]) -> bytes:
    """Return one vector's int8 form, its scale in front, made element by element of the formula."""
    (scale,) = struct.unpack("<f", struct.pack("<f", max(abs(value) for value in values) / 127.0))
    numbers = [max(-127, min(127, _half_to_even(value / scale))) if scale else 0 for value in values]
    return struct.pack("<f", scale) + struct.pack(f"<{len(values)}b", *numbers)


def _half_to_even(value: float) -> int:
    return round(value) if math.isfinite(value) else 0
