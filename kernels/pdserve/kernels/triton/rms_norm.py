"""RMS normalisation of rows, after a residual is added.

    h = x + residual                                      (only where there is a residual; h replaces it)
    y = h / sqrt(mean(h^2) + eps) * w                     or * (1 + w) with a unit offset

Sums are float32. As in transformers' modules, a weight without offset multiplies what was already rounded to the type of x (Llama
and its kin), a weight with offset what was not (Gemma). Source: arXiv:1910.07467.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import FLOATS, check, check_dtype, check_together

MAX_WIDTH = 16384
"""A row lies in the registers of one program."""


@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    y,
    s_x,
    s_residual,
    s_y,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Normalise one row; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_PAD)
    mask = columns < width
    h = tl.load(x + row * s_x + columns, mask=mask, other=0.0).to(tl.float32)  # [WIDTH_PAD]
    if HAS_RESIDUAL:
        h += tl.load(residual + row * s_residual + columns, mask=mask, other=0.0).to(tl.float32)  # [WIDTH_PAD]
        rounded = h.to(y.dtype.element_ty)
        tl.store(residual + row * s_residual + columns, rounded, mask=mask)
        h = rounded.to(tl.float32)
    normal = h * tl.rsqrt(tl.sum(h * h, 0) / width + eps)
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)  # [WIDTH_PAD]
    if UNIT_OFFSET:
        normal *= 1.0 + w
    else:
        normal = normal.to(y.dtype.element_ty).to(tl.float32) * w
    tl.store(y + row * s_y + columns, normal.to(y.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, unit_offset: bool = False
) -> Tensor:
    """Return y [rows, width] for `x` [rows, width] and `weight` [width]; `residual` [rows, width] becomes h.

    `x`, `residual` and y have one type. Raises ValueError if shapes, types, strides or devices disagree.
    """
    check_together(x=x, weight=weight, residual=residual)
    check_dtype("x", x, *FLOATS)
    check(x.dim() == 2 and weight.shape == x.shape[1:], f"weight {tuple(weight.shape)} does not fit {tuple(x.shape)}")
    check(x.shape[1] <= MAX_WIDTH, f"rows of {x.shape[1]} are longer than {MAX_WIDTH}")
    if residual is not None:
        check(residual.shape == x.shape, f"residual {tuple(residual.shape)} does not fit {tuple(x.shape)}")
        check_dtype("residual", residual, x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    padded = triton.next_power_of_2(x.shape[1])
    norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight,
        y,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        y.stride(0),
        x.shape[1],
        eps,
        HAS_RESIDUAL=residual is not None,
        UNIT_OFFSET=unit_offset,
        WIDTH_PAD=padded,
        num_warps=8 if padded > 2048 else 4,
    )
    return y


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return y and h, in plain torch."""
    h = x if residual is None else x + residual
    normal = h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normal * (1.0 + weight.float())).to(x.dtype), h
    return (normal.to(x.dtype).float() * weight.float()).to(x.dtype), h
