"""The gate of a feed-forward layer.

    y = silu(gate) * up,    silu(g) = g / (1 + e^-g)

in float32, rounded once. Source: arXiv:2002.05202 (SwiGLU).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.triton.arguments import FLOATS, check, check_dtype, check_together

COLUMNS = 1024
"""Columns of a row that one program takes."""


@triton.jit
def silu_mul_kernel(gate, up, y, s_gate, s_up, s_y, width, COLUMNS: tl.constexpr):
    """Gate one part of a row; grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    g = tl.load(gate + row * s_gate + columns, mask=mask, other=0.0).to(tl.float32)  # [COLUMNS]
    u = tl.load(up + row * s_up + columns, mask=mask, other=0.0).to(tl.float32)  # [COLUMNS]
    product = g / (1.0 + tl.exp(-g)) * u
    tl.store(y + row * s_y + columns, product.to(y.dtype.element_ty), mask=mask)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return y [rows, width] for `gate` and `up` [rows, width], which may be halves of one tensor.

    Raises ValueError if shapes, types, strides or devices disagree.
    """
    check_together(gate=gate, up=up)
    check_dtype("gate", gate, *FLOATS)
    check_dtype("up", up, gate.dtype)
    check(gate.dim() == 2 and gate.shape == up.shape, f"gate {tuple(gate.shape)} does not fit up {tuple(up.shape)}")
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    columns = min(COLUMNS, triton.next_power_of_2(gate.shape[1]))
    silu_mul_kernel[(gate.shape[0], triton.cdiv(gate.shape[1], columns))](
        gate, up, y, gate.stride(0), up.stride(0), y.stride(0), gate.shape[1], COLUMNS=columns, num_warps=4
    )
    return y


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return the same, in plain torch."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)
