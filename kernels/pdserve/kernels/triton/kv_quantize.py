"""Write keys and values into a one-byte cache, each head of each token with a scale of its own.

    scale[slot, h] = max_d |x[t, h, d]| / largest        (1 where all are 0)
    cache[slot, h, d] = round(x[t, h, d] / scale)         slot = slots[t] >= 0

`largest` is 127 for int8, where halves round away from 0, and 448 for float8 (e4m3), which rounds to even. A scale by token and
head needs no calibration, and costs 4 bytes beside `dim`. Attention multiplies scores by the keys' scales and weights by the
values'.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import FLOATS, check, check_dtype, check_together
from pdserve.kernels.triton.cache import ONE_BYTE, PagedCache
from pdserve.kernels.triton.kv_write import check_write

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def quantize_kernel(
    new,
    cache,
    scales,
    slots,
    s_token,
    s_head,
    s_cache_slot,
    s_cache_head,
    s_scale_slot,
    num_heads,
    LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write some heads of one token; grid (tokens, groups of heads)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)  # a scalar inside the grid
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM_PAD)
    is_head = (heads < num_heads) & (slot >= 0)
    mask = is_head[:, None] & (dims < DIM)[None, :]
    x = tl.load(new + token * s_token + heads[:, None] * s_head + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    highest = tl.max(tl.abs(x), 1)  # [HEADS]
    scale = tl.where(highest > 0.0, highest / LARGEST, 1.0)
    y = x / scale[:, None]  # [HEADS, DIM_PAD]
    if ROUNDS:
        y = tl.where(y >= 0.0, tl.floor(y + 0.5), tl.ceil(y - 0.5))
    y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
    place = cache + slot * s_cache_slot + heads[:, None] * s_cache_head + dims[None, :]
    tl.store(place, y.to(cache.dtype.element_ty), mask=mask)
    tl.store(scales + slot * s_scale_slot + heads, scale, mask=is_head)


def write_quantized_kv(cache: PagedCache, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Scatter `keys` [tokens, kv_heads, key_dim] and `values` [tokens, kv_heads, value_dim] by `slots` [tokens] into `cache`.

    Slots are distinct, or negative for no write. Raises ValueError if shapes, types, strides or devices disagree.
    """
    check_write(cache.keys, cache.values, keys, values, slots)
    pairs = [
        (keys, cache.keys, _scales_of(cache.keys, cache.key_scales)),
        (values, cache.values, _scales_of(cache.values, cache.value_scales)),
    ]
    for new, _, _ in pairs:
        check_dtype("new", new, *FLOATS)
    # Nothing is written before all is checked.
    for new, stored, scales in pairs:
        if new.shape[0]:
            _write(new, stored, scales, slots)


def _scales_of(stored: Tensor, scales: Tensor | None) -> Tensor:
    check_dtype("cache", stored, *ONE_BYTE)
    if scales is None or scales.dtype != torch.float32 or scales.shape != stored.shape[:2]:
        raise ValueError(f"a cache of {stored.dtype} needs float32 scales {tuple(stored.shape[:2])}")
    check_together(stored=stored, scales=scales)
    check(scales.is_contiguous(), "scales are not contiguous")
    return scales


def _write(new: Tensor, stored: Tensor, scales: Tensor, slots: Tensor) -> None:
    num_tokens, num_heads, dim = new.shape
    at_once = min(8, triton.next_power_of_2(num_heads))
    quantize_kernel[(num_tokens, triton.cdiv(num_heads, at_once))](
        new,
        stored,
        scales,
        slots,
        *new.stride()[:2],
        *stored.stride()[:2],
        scales.stride(0),
        num_heads,
        LARGEST=LARGEST[stored.dtype],
        ROUNDS=stored.dtype == torch.int8,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        HEADS=at_once,
        num_warps=4,
    )


def quantize_reference(new: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return [tokens, heads, dim] in one byte and its scales [tokens, heads], in plain torch."""
    x = new.float()
    highest = x.abs().amax(dim=-1)
    scale = torch.where(highest > 0, highest / LARGEST[dtype], 1.0)
    y = x / scale[..., None]
    if dtype == torch.int8:
        y = torch.where(y >= 0, (y + 0.5).floor(), (y - 0.5).ceil())
    return y.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale
