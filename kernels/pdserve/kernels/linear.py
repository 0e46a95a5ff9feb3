"""Linear layers on the CPU with weights packed once, at load.

    y = x W^T + b

Plain `F.linear` hands W to the matrix library in row-major order at every call. oneDNN computes the same from W stored in
blocks that fit its kernels; packing it beforehand makes SmolLM2's layers about twice as fast at any number of rows, in fp32.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear` in inference, holding its weight in packed form only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features], unpacked anew each time: for the rare model that reads it itself."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for `x` [..., in_features]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing is possible here and pays: fp32 on the CPU, with a torch that has the operators."""
    has_operators = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available() and has_operators  # type: ignore[no-untyped-call]  # torch leaves it untyped


def pack_linears(module: nn.Module) -> int:
    """Replace every plain `nn.Linear` inside `module`; return how many. Subclasses keep their own ways.

    A weight that is shared with another module (a tied embedding) stays there as it is.
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
