"""Modules of `transformers` whose inner operations our fused kernels replace at load: by type, by name, and loudly.

Only types that are listed here are touched, since a name does not say what a module computes (Gemma's RMSNorm adds 1 to its
weights). What looks as if it could be fused and is not listed keeps torch's operations, and the log names it.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import cast

from torch import Tensor, nn

from pdserve.kernels.triton.rms_norm import rms_norm
from pdserve.kernels.triton.rope import rotate
from pdserve.kernels.triton.silu_mul import silu_mul

log = logging.getLogger(__name__)

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
RMS_NORMS = frozenset(f"{family}RMSNorm" for family in FAMILIES)
"""y = weight * x / sqrt(mean(x^2) + variance_epsilon)"""
GATED_LAYERS = frozenset(f"{family}MLP" for family in FAMILIES)
"""y = down_proj(act_fn(gate_proj(x)) * up_proj(x))"""
ATTENTIONS = frozenset(f"{family}Attention" for family in FAMILIES)
"""Call `apply_rotary_pos_emb(q, k, cos, sin)` with all dims rotary, halves paired."""
ROTATION = "apply_rotary_pos_emb"
CANDIDATES = ("RMSNorm", "MLP", "Attention")
"""Ends of the names of types that are logged when they are not fused."""


class FusedRmsNorm(nn.Module):
    """Takes the place of an RMSNorm of `RMS_NORMS`, with its weight."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = float(cast(float, norm.variance_epsilon))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., width] for `x` [..., width]."""
        weight = cast(Tensor, self.weight)
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, self.variance_epsilon).view(x.shape)


class FusedGatedLayer(nn.Module):
    """Takes the place of a feed-forward layer of `GATED_LAYERS` whose gate is SiLU, with its linear layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gate_proj = cast(nn.Module, layer.gate_proj)
        self.up_proj = cast(nn.Module, layer.up_proj)
        self.down_proj = cast(nn.Module, layer.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., width] for `x` [..., width]."""
        gate: Tensor = self.gate_proj(x)
        up: Tensor = self.up_proj(x)
        y: Tensor = self.down_proj(silu_mul(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape))
        return y


def fused_rotation(
    query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate `query` and `keys` [1, heads, rows, dim] in place by `cos` and `sin` [1, rows, dim], and return them."""
    assert unsqueeze_dim == 1
    for tensor in (query, keys):
        rotate(tensor[0].transpose(0, 1), cos[0], sin[0])
    return query, keys


def fuse_modules(model: nn.Module) -> None:
    """Replace what is known inside `model`, and log how many of which type were replaced and which were not."""
    fused, left = Counter[str](), Counter[str]()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child).__name__
            replace = _replacement_of(child)
            if replace is not None:
                setattr(parent, name, replace(child))
                fused[kind] += 1
            elif kind in ATTENTIONS and _fuse_rotation(child):
                fused[kind] += 1
            elif kind.endswith(CANDIDATES):
                left[kind] += 1
    log.info("fused by Triton: %s", _listed(fused))
    if left:
        log.warning("not fused, torch's own operations stay: %s", _listed(left))


def _replacement_of(module: nn.Module) -> Callable[[nn.Module], nn.Module] | None:
    kind = type(module).__name__
    if kind in RMS_NORMS:
        return FusedRmsNorm
    if kind in GATED_LAYERS and type(module.act_fn).__name__ in {"SiLU", "SiLUActivation"}:
        return FusedGatedLayer
    return None


def _fuse_rotation(attention: nn.Module) -> bool:
    """Give one attention module a forward that is its own but for the rotation; False if it calls none by that name.

    The function is copied with other globals, for this one module: no other model of the process notices.
    """
    forward = inspect.unwrap(type(attention).forward)
    if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
        return False
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTATION: fused_rotation},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    attention.forward = MethodType(own, attention)
    return True


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "nothing"
