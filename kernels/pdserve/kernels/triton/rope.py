"""Rotate pairs of a head's dims by the angle of its position (rotary embedding), halves paired.

With d rotary dims, i < d / 2 and the cosine and sine of position times frequency i:

    y[i]         = x[i] cos[i] - x[i + d / 2] sin[i]
    y[i + d / 2] = x[i + d / 2] cos[i] + x[i] sin[i]
    y[j]         = x[j]                                   for j >= d

in float32, rounded once. Source: arXiv:2104.09864, in the pairing of GPT-NeoX, which transformers uses.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import FLOATS, check, check_dtype, check_together


@triton.jit
def rope_kernel(
    x,
    cos,
    sin,
    s_token,
    s_head,
    s_cos,
    s_sin,
    num_heads,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate a token's heads in place; grid (tokens, groups of heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF_PAD)
    is_pair = pairs < HALF
    mask = (heads < num_heads)[:, None] & is_pair[None, :]
    c = tl.load(cos + token * s_cos + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]  # [1, HALF_PAD]
    s = tl.load(sin + token * s_sin + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]  # [1, HALF_PAD]
    low = x + token * s_token + heads[:, None] * s_head + pairs[None, :]
    a = tl.load(low, mask=mask, other=0.0).to(tl.float32)  # [HEADS, HALF_PAD]
    b = tl.load(low + HALF, mask=mask, other=0.0).to(tl.float32)  # [HEADS, HALF_PAD]
    tl.store(low, (a * c - b * s).to(x.dtype.element_ty), mask=mask)
    tl.store(low + HALF, (b * c + a * s).to(x.dtype.element_ty), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `x` [tokens, heads, dim] in place by `cos` and `sin` [tokens, d], d even and at most dim; first halves count.

    Raises ValueError if shapes, types, strides or devices disagree.
    """
    check_together(x=x, cos=cos, sin=sin)
    check_dtype("x", x, *FLOATS)
    num_tokens, num_heads, dim = x.shape
    rotary = cos.shape[1]
    check(cos.shape == sin.shape == (num_tokens, rotary), f"cos and sin are not [{num_tokens}, d]")
    check(rotary % 2 == 0 and rotary <= dim, f"{rotary} rotary dims do not fit heads of {dim}")
    if x.numel() == 0 or rotary == 0:
        return
    at_once = min(8, triton.next_power_of_2(num_heads))
    rope_kernel[(num_tokens, triton.cdiv(num_heads, at_once))](
        x,
        cos,
        sin,
        *x.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        num_heads,
        HALF=rotary // 2,
        HALF_PAD=triton.next_power_of_2(rotary // 2),
        HEADS=at_once,
        num_warps=4,
    )


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` rotated, in plain torch."""
    half = cos.shape[1] // 2
    c, s = cos[:, None, :half].float(), sin[:, None, :half].float()
    a, b, rest = x.float().split([half, half, x.shape[2] - 2 * half], dim=2)
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=2).to(x.dtype)
