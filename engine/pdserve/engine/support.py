"""What can be told from a model's config before its weights are read: refusals by name, length, and the fields of identity."""

import json
from typing import Any

from transformers import PreTrainedConfig

from pdserve.core.errors import ConfigError, ModelUnsupported
from pdserve.core.layout import KvLayout

SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}

NOT_SHAPING_KV = frozenset(
    {
        "_model_name_or_path",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "sep_token_id",
        "task_specific_params",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Config fields that cannot change keys or values. All others count: an unknown field is rather compared than trusted."""


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of the config that describes the language model."""
    return config.get_text_config(decoder=True)


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the name that refusals and identity use: model type and class."""
    named = getattr(config, "architectures", None)
    return f"{config.model_type} ({named[0]})" if named else str(config.model_type)


def check_config(config: PreTrainedConfig) -> None:
    """Raise ModelUnsupported, naming the architecture and the reason, for what is known not to be served."""
    text = text_config(config)
    reason = _refusal(config, text)
    if reason:
        raise ModelUnsupported(f"{architecture_of(config)} is not served: {reason}")


def _refusal(config: PreTrainedConfig, text: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if getattr(text, "kv_lora_rank", None) is not None:
        return "it uses latent attention (MLA)"
    if getattr(text, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    if getattr(text, "alibi", False):
        return "it uses ALiBi position biases"
    others = sorted(set(getattr(text, "layer_types", None) or []) - SERVED_LAYER_TYPES)
    if others:
        return f"it has layers of type {', '.join(others)}"
    dynamic = sorted(kind for kind in _rope_types(text) if "dynamic" in kind)
    if dynamic:
        return f"its {dynamic[0]} rotary scaling makes a token's KV depend on the length of the text around it"
    return None


def served_length(config: PreTrainedConfig, requested: int | None) -> int:
    """Return the longest sequence in tokens: `requested`, or the model's own limit; raise ConfigError if it is too long."""
    text = text_config(config)
    limits = {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    if "longrope" in _rope_types(text):
        # Past this length every frequency changes, also those of keys that are already in the pool.
        limits["original_max_position_embeddings (longrope)"] = _longrope_limit(text)
    stated = {name: int(limit) for name, limit in limits.items() if limit}
    if not stated:
        if requested is None:
            raise ConfigError(["max_model_len: the model's config states no limit"], hint="give --max-model-len")
        return requested
    name, limit = min(stated.items(), key=lambda item: item[1])
    if requested is not None and requested > limit:
        raise ConfigError([f"max_model_len: {requested} exceeds the model's {name} of {limit}"])
    return requested or limit


def kv_fields(config: PreTrainedConfig, layout: KvLayout) -> dict[str, str]:
    """Return everything that shapes keys and values, by name, as JSON texts; `layout` is what the probe measured."""
    content = text_config(config).to_dict()
    fields = {
        name: json.dumps(value, sort_keys=True, default=str)
        for name, value in content.items()
        if name not in NOT_SHAPING_KV and not name.endswith(("_dropout", "_pdrop", "dropout"))
    }
    return fields | {"layout": _describe(layout)}


def _describe(layout: KvLayout) -> str:
    runs: list[tuple[int, str]] = []
    for layer in layout.layers:
        text = f"{layer.num_kv_heads}x{layer.key_dim}/{layer.value_dim} window {layer.window or 'none'}"
        if runs and runs[-1][1] == text:
            runs[-1] = (runs[-1][0] + 1, text)
        else:
            runs.append((1, text))
    return "; ".join(f"{count} of {text}" for count, text in runs)


def _rope_parameters(text: PreTrainedConfig) -> list[dict[str, Any]]:
    stated = getattr(text, "rope_parameters", None)
    if not isinstance(stated, dict):
        return []
    nested = [value for value in stated.values() if isinstance(value, dict)]
    return nested if nested and "rope_type" not in stated else [stated]


def _rope_types(text: PreTrainedConfig) -> set[str]:
    return {str(parameters.get("rope_type", "default")) for parameters in _rope_parameters(text)}


def _longrope_limit(text: PreTrainedConfig) -> int | None:
    stated = [parameters.get("original_max_position_embeddings") for parameters in _rope_parameters(text)]
    limit = next((value for value in stated if value), getattr(text, "original_max_position_embeddings", None))
    return int(limit) if limit else None
