"""What a known architecture does between its matrices, read off a `transformers` module, for the native forward pass.

The families here are decoders of one shape (norm, attention, norm, gated MLP, each added to what came before) with the
differences that `Family` lists. What a module holds is read from the module itself; what only its code says stands in `FAMILIES`,
by model type. Nothing here is trusted: `forwards` compares the result with the module before it may serve.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pdserve.engine.support import text_config
from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.native.product import PackedWeight, pack_weight
from pdserve.kernels.native.structures import Activation, WeightFormat

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}


class NotKnown(Exception):
    """The module is not of a known family; the text says what is different."""


@dataclass(frozen=True)
class Family:
    """What the code of an architecture says and its module does not hold."""

    norm_offset: float = 0.0
    """Added to a norm's scale: Gemma's scales are written around 0."""
    embed_factor: Callable[[PreTrainedConfig], float] = lambda _: 1.0
    is_interleaved: bool = False
    """Rotary pairs are neighbours."""


def _root_of_width(config: PreTrainedConfig) -> float:
    return math.sqrt(text_config(config).hidden_size)


GEMMA = Family(norm_offset=1.0, embed_factor=_root_of_width)
LLAMA = Family()

FAMILIES = {
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "llama": LLAMA,
    "ministral": LLAMA,
    "mistral": LLAMA,
    "olmo": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "seed_oss": LLAMA,
    "smollm3": LLAMA,
}


@dataclass(frozen=True)
class NormParts:
    """A norm over the last dimension: scale (its offset added), bias or None."""

    scale: Tensor
    bias: Tensor | None
    epsilon: float
    is_centered: bool


@dataclass(frozen=True)
class RotaryParts:
    """Frequencies [pairs] and the factor of cosine and sine."""

    frequencies: Tensor
    scaling: float


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. `after_attention` and `after_mlp` norm what is added; None where it is added as it is."""

    before_attention: NormParts
    qkv: PackedWeight
    query_norm: NormParts | None
    key_norm: NormParts | None
    rotary: RotaryParts | None
    out: PackedWeight
    after_attention: NormParts | None
    before_mlp: NormParts
    gate_up: PackedWeight
    down: PackedWeight
    after_mlp: NormParts | None


@dataclass(frozen=True)
class ModelParts:
    """A whole decoder. `head` is the embedding where they are tied. Of the module's large tensors it holds none."""

    embedding: PackedWeight
    embed_factor: float
    layers: list[LayerParts]
    norm: NormParts
    head: PackedWeight
    activation: Activation
    is_interleaved: bool
    logit_cap: float | None
    rotaries: list[RotaryParts] = field(default_factory=list)


def read_model(module: nn.Module, config: PreTrainedConfig, weight_format: WeightFormat) -> ModelParts:
    """Take the module apart and pack its weights; raise NotKnown, saying why."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise NotKnown(f"model type {config.model_type} is not among {', '.join(sorted(FAMILIES))}")
    try:
        return _Reader(module, text_config(config), family, weight_format).model()
    except AttributeError as error:
        raise NotKnown(f"{config.model_type}: {error}") from error


class _Reader:
    def __init__(self, module: Any, config: PreTrainedConfig, family: Family, weight_format: WeightFormat) -> None:
        self._module = module
        self._config = config
        self._family = family
        self._weight_format = weight_format
        self._rotaries: dict[str, RotaryParts] = {}

    def model(self) -> ModelParts:
        base, head = self._module.model, self._module.lm_head
        activation = ACTIVATIONS.get(getattr(self._config, "hidden_activation", None) or self._config.hidden_act)
        if activation is None:
            raise NotKnown(f"activation {self._config.hidden_act}")
        embedding = pack_weight(base.embed_tokens.weight, None, self._weight_format)
        is_tied = head.bias is None and head.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
        layers = [self._layer(layer) for layer in base.layers]
        return ModelParts(
            embedding=embedding,
            embed_factor=self._family.embed_factor(self._config),
            layers=layers,
            norm=self._norm(base.norm),
            head=embedding if is_tied else self._packed(head),
            activation=activation,
            is_interleaved=self._family.is_interleaved,
            logit_cap=getattr(self._config, "final_logit_softcapping", None),
            rotaries=list(self._rotaries.values()),
        )

    def _layer(self, layer: Any) -> LayerParts:
        attention, mlp = layer.self_attn, layer.mlp
        is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
        after_attention = self._norm(layer.post_attention_layernorm)
        return LayerParts(
            before_attention=self._norm(layer.input_layernorm),
            qkv=self._packed(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=self._norm(attention.q_norm) if getattr(attention, "q_norm", None) is not None else None,
            key_norm=self._norm(attention.k_norm) if getattr(attention, "k_norm", None) is not None else None,
            rotary=self._rotary(attention),
            out=self._packed(attention.o_proj),
            after_attention=after_attention if is_sandwich else None,
            before_mlp=self._norm(layer.pre_feedforward_layernorm) if is_sandwich else after_attention,
            gate_up=self._packed(mlp.gate_proj, mlp.up_proj),
            down=self._packed(mlp.down_proj),
            after_mlp=self._norm(layer.post_feedforward_layernorm) if is_sandwich else None,
        )

    def _norm(self, norm: Any) -> NormParts:
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        epsilon = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
        is_centered = isinstance(norm, nn.LayerNorm) or "LayerNorm" in type(norm).__name__
        if weight is None:
            weight, epsilon = torch.ones(norm.normalized_shape), epsilon or 1e-5
        return NormParts(weight.detach().float() + self._family.norm_offset, bias, float(epsilon or 1e-6), is_centered)

    def _rotary(self, attention: Any) -> RotaryParts | None:
        if not getattr(attention, "use_rope", True):
            return None
        rotary = self._module.model.rotary_emb
        kind = "" if hasattr(rotary, "inv_freq") else f"{attention.layer_type}_"
        if kind not in self._rotaries:
            frequencies, scaling = getattr(rotary, f"{kind}inv_freq"), getattr(rotary, f"{kind}attention_scaling")
            self._rotaries[kind] = RotaryParts(frequencies.float(), float(scaling))
        return self._rotaries[kind]

    def _packed(self, *linears: Any) -> PackedWeight:
        """Pack linear layers of one input, one below the other."""
        other = next((linear for linear in linears if type(linear) not in (nn.Linear, PackedLinear)), None)
        if other is not None:
            raise NotKnown(f"a linear layer of type {type(other).__name__}")
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias for linear in linears]
        stacked = None
        if any(bias is not None for bias in biases):
            pairs = zip(weights, biases, strict=True)
            stacked = torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in pairs])
        return pack_weight(weights[0] if len(weights) == 1 else torch.cat(weights), stacked, self._weight_format)
