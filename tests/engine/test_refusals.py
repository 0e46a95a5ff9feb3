"""What cannot be served is refused at load, by name; what can only be served in part, in that part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pdserve.core.errors import ConfigError, ModelUnsupported
from pdserve.engine.attention import ATTENTION_NAME
from pdserve.engine.engine import Engine
from pdserve.engine.loading import LoadedModel
from pdserve.engine.quiet import quieten_transformers
from pdserve.engine.support import architecture_of, check_config, served_length
from tests.architectures.tiny import COMMON, SLIDING, VOCAB_SIZE
from tests.engine.small import model_of

LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
}
MAMBA = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16}
YARN_LIKE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


def config_of(model_type: str, **extra: Any) -> Any:
    common = {name: value for name, value in COMMON.items() if (model_type, name) != ("falcon", "head_dim")}
    return CONFIG_MAPPING[model_type](**(common | extra))


@pytest.mark.parametrize(
    ("model_type", "extra", "reason"),
    [
        ("deepseek_v3", LATENT, "latent attention"),
        ("deepseek_v2", LATENT, "latent attention"),
        ("qwen3_next", {}, "linear_attention"),
        ("lfm2", {"full_attn_idxs": [0, 2]}, "conv"),
        ("minimax", {}, "linear_attention"),
        ("mamba2", MAMBA, "linear_attention"),
        ("falcon_h1", {}, "hybrid"),
        ("llama4_text", {}, "chunked_attention"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "share keys and values"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("t5", {}, "encoder-decoder"),
        ("llama", {"rope_parameters": YARN_LIKE | {"rope_type": "dynamic"}}, "dynamic rotary scaling"),
    ],
)
def test_refused_by_their_config(model_type: str, extra: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelUnsupported, match=f"{model_type}.*{reason}"):
        check_config(config_of(model_type, **extra))


def engine_on(model_type: str, **extra: Any) -> Engine:
    """Make an engine without asking the config first, so that the probe alone has to find out."""
    quieten_transformers()
    torch.manual_seed(0)
    config = config_of(model_type, **extra)
    factory: Any = AutoModelForCausalLM
    return engine_of(factory.from_config(config, attn_implementation=ATTENTION_NAME).float().eval(), config)


def engine_of(module: torch.nn.Module, config: Any) -> Engine:
    model = LoadedModel(
        module, config, architecture_of(config), "", "", frozenset(), VOCAB_SIZE, config.num_hidden_layers
    )
    return Engine(model, dtype="float32", device="cpu", block_size=4, num_blocks=4)


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("bloom", {}),  # computes attention on its own, and gives the right tokens all the same (failure class 31)
        ("mpt", {}),
        ("rwkv", {}),
        ("mamba2", MAMBA),
    ],
)
def test_models_that_go_past_the_pool_are_refused_by_the_probe(model_type: str, extra: dict[str, Any]) -> None:
    with pytest.raises(
        ModelUnsupported, match=rf"{model_type} calls paged attention 0 times for {COMMON['num_hidden_layers']}"
    ):
        engine_on(model_type, **extra)


def test_a_recurrent_branch_beside_attention_is_found_by_behaviour() -> None:
    """falcon_h1 calls attention once in each layer, as it should, and mixes tokens in a second branch."""
    with pytest.raises(ModelUnsupported, match=r"falcon_h1 gives other logits in a mixed step"):
        engine_on("falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=16, mamba_n_groups=1)


class Tampered(torch.nn.Module):
    """A served model whose attention is called in another way."""

    def __init__(self, module: torch.nn.Module, tamper: Any) -> None:
        super().__init__()
        self.inner = module
        for layer in module.model.layers:  # type: ignore[union-attr]  # a llama
            layer.self_attn.register_forward_pre_hook(tamper, with_kwargs=True)

    def forward(self, **kwargs: Any) -> Any:
        return self.inner(**kwargs)


def _without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"attention_mask": torch.ones(1, 1, 1, 1)}


def _with_bias(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"position_bias": torch.zeros(1)}


def _not_causal(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"is_causal": False}


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (_without_mask, "mask changed after it was made"),
        (_with_bias, "attention with position_bias"),
        (_not_causal, "not causal"),
    ],
)
def test_ingredients_that_paged_attention_would_drop_are_refused(tamper: Any, reason: str) -> None:
    quieten_transformers()
    config = config_of("llama")
    factory: Any = AutoModelForCausalLM
    module = factory.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    with pytest.raises(ModelUnsupported, match=reason):
        engine_of(Tampered(module, tamper), config)


def test_shared_keys_are_refused_by_the_probe_too() -> None:
    with pytest.raises(ModelUnsupported, match="keys shared between layers"):
        engine_on("gemma4_text", num_kv_shared_layers=2, **SLIDING)


def test_the_mask_decides_about_the_window_not_the_argument() -> None:
    """In transformers' own attention the argument does nothing, and some models pass one that their mask does not have."""

    def with_argument(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"sliding_window": 3}

    quieten_transformers()
    config = config_of("llama")
    factory: Any = AutoModelForCausalLM
    module = factory.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    assert {layer.window for layer in engine_of(Tampered(module, with_argument), config).layout.layers} == {None}


def test_broken_weights_are_refused() -> None:
    model = model_of("llama")
    weight: Tensor = next(iter(model.module.parameters()))
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        with pytest.raises(ModelUnsupported, match="by nan"):
            Engine(model, dtype="float32", device="cpu", block_size=4, num_blocks=4)
    finally:
        with torch.no_grad():
            weight.copy_(saved)


def test_longrope_is_served_up_to_the_length_at_which_its_frequencies_change() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = config_of(
        "phi3", rope_parameters=YARN_LIKE | factors | {"rope_type": "longrope"}, original_max_position_embeddings=32
    )
    check_config(config)
    assert served_length(config, None) == 32
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        served_length(config, 33)


@pytest.mark.parametrize(("threads", "dtype", "blocks"), [(0, "float64", 0)])
def test_all_faults_of_the_settings_at_once(threads: int, dtype: str, blocks: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine.load(tmp_path, threads=threads, dtype=dtype, num_blocks=blocks)
    assert len(caught.value.faults) == 3
