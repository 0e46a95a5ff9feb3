"""Weights in panels, the form that native products read.

    panels[p, k, n] = w[32 p + n, k]                  float32, float16
    panels[p, k // 2, n, k % 2] = w[32 p + n, k]      bfloat16

Outputs that are missing in the last panel, and an input that is missing in the last pair, are zero. What `src/product.c` computes
from them is `x @ w.T + bias`; it sums in an order that does not depend on the number of rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as fn
from torch import Tensor

from pdserve.kernels.native.structures import WeightFormat, WeightStruct

PANEL = 32
PADDING_BYTES = 8192
"""Behind the last panel: products announce their reading that far ahead."""

WEIGHT_DTYPES = {
    WeightFormat.F32: torch.float32,
    WeightFormat.F16: torch.float16,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.BF16_DOT: torch.bfloat16,
}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [num_outputs, num_inputs] in panels, of which it holds the only copy; `bias` [num_outputs] float32 or None."""

    panels: Tensor
    bias: Tensor | None
    weight_format: WeightFormat
    num_outputs: int
    num_inputs: int

    @property
    def x_dtype(self) -> torch.dtype:
        """What the product wants its rows in."""
        return torch.bfloat16 if self.weight_format is WeightFormat.BF16_DOT else torch.float32

    @property
    def x_width(self) -> int:
        """How long a row must be: `num_inputs`, and one zero more where inputs come in pairs and their number is odd."""
        return self.num_inputs + (self.num_inputs % 2 if _is_paired(self.weight_format) else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.numel() * self.panels.element_size()

    def struct(self) -> WeightStruct:
        """Return it for C; valid as long as this object."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return WeightStruct(self.panels.data_ptr(), bias, self.weight_format, self.num_outputs, self.x_width)


def pack_weight(weight: Tensor, bias: Tensor | None, weight_format: WeightFormat) -> PackedWeight:
    """Pack `weight` [num_outputs, num_inputs], cast to the format's type, with `bias` [num_outputs] or None."""
    num_outputs, num_inputs = weight.shape
    paired = _is_paired(weight_format)
    padded = fn.pad(
        weight.detach().to(WEIGHT_DTYPES[weight_format]), (0, num_inputs % 2 if paired else 0, 0, -num_outputs % PANEL)
    )
    panels = padded.view(-1, PANEL, padded.shape[1])
    panels = panels.view(len(panels), PANEL, -1, 2).permute(0, 2, 1, 3) if paired else panels.transpose(1, 2)
    memory = panels.new_empty(panels.numel() + PADDING_BYTES // panels.element_size())
    packed = memory[: panels.numel()].view(panels.shape)
    packed.copy_(panels)
    return PackedWeight(
        panels=packed,
        bias=None if bias is None else bias.detach().float().contiguous(),
        weight_format=weight_format,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )


def unpack_weight(packed: PackedWeight) -> Tensor:
    """Return the weight [num_outputs, num_inputs] in its type."""
    panels = packed.panels
    rows = (
        panels.permute(0, 2, 1, 3).flatten(2) if _is_paired(packed.weight_format) else panels.transpose(1, 2)
    ).flatten(0, 1)
    return rows[: packed.num_outputs, : packed.num_inputs].contiguous()


def product_reference(packed: PackedWeight, x: Tensor) -> Tensor:
    """Return x [rows, num_inputs] times the weight, plus its bias, in float64."""
    y = x.double() @ unpack_weight(packed).double().T
    return y if packed.bias is None else y + packed.bias.double()


def _is_paired(weight_format: WeightFormat) -> bool:
    return weight_format in (WeightFormat.BF16, WeightFormat.BF16_DOT)
