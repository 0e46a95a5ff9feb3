"""Tiny random models of every served architecture, made so that attention decides what they say.

Random weights of the usual size make attention nearly uniform and its output nearly nothing, and then even a broken attention
passes (gemma and gpt2 pass with it zeroed). So the weights of attention are scaled up, windows are shorter than the prompts,
caps and sinks are of the size of the scores, and only models whose two best logits stay apart at every step are used.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from pdserve.engine.attention import ATTENTION_NAME
from pdserve.engine.loading import LoadedModel
from pdserve.engine.quiet import quieten_transformers
from pdserve.engine.support import architecture_of, check_config, text_config

VOCAB_SIZE = 199
WINDOW = 6
NUM_LAYERS = 4
ATTENTION_SCALE = 6.0
"""Factor on the weights of attention: initial weights have a standard deviation of 0.02."""
OUTPUT_SCALE = 6.0
"""Factor on the output embedding, so that logits have a standard deviation of about 1."""

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Tied weights would let the last token answer for itself, past attention.
    "tie_word_embeddings": False,
}
ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
EVERY_WINDOW: dict[str, Any] = {"sliding_window": WINDOW}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Tiny:
    """One architecture: its model type, what its config needs beyond `COMMON`, and what there is to ignore."""

    model_type: str
    extra: dict[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


WINDOWED = ("window",)
ARCHITECTURES = [
    Tiny("llama"),
    Tiny("qwen2", SLIDING | {"use_sliding_window": True}, WINDOWED),
    Tiny("qwen3", SLIDING | {"use_sliding_window": True}, WINDOWED),
    Tiny("mistral", EVERY_WINDOW, WINDOWED),
    Tiny("ministral", SLIDING, WINDOWED),
    Tiny("gemma"),
    Tiny("gemma2", SLIDING | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}, ("window", "softcap")),
    Tiny("gemma3_text", SLIDING | {"query_pre_attn_scalar": 16}, WINDOWED),
    Tiny(
        "gemma4_text",
        SLIDING
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE},
        WINDOWED,
    ),
    Tiny("phi"),
    Tiny("phi3", EVERY_WINDOW, WINDOWED),
    Tiny("olmo"),
    Tiny("olmo2"),
    Tiny("olmo3", SLIDING, WINDOWED),
    Tiny("granite"),
    Tiny("granitemoe", LOCAL_MOE),
    Tiny("cohere", {"logit_scale": 1.0}),
    Tiny("cohere2", SLIDING | {"logit_scale": 1.0}, WINDOWED),
    Tiny("gpt_oss", SLIDING | LOCAL_MOE, ("window", "sinks")),
    Tiny("mixtral", LOCAL_MOE | EVERY_WINDOW, WINDOWED),
    Tiny(
        "qwen2_moe",
        SLIDING | MOE | {"use_sliding_window": True, "shared_expert_intermediate_size": 32},
        WINDOWED,
    ),
    Tiny("qwen3_moe", EVERY_WINDOW | MOE | {"use_sliding_window": True}, WINDOWED),
    Tiny("olmoe", MOE),
    Tiny("smollm3", SLIDING | {"use_sliding_window": True}, WINDOWED),
    Tiny("glm"),
    Tiny("glm4"),
    Tiny(
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
    Tiny("starcoder2", EVERY_WINDOW, WINDOWED),
    Tiny("gpt_neox"),
    Tiny("gpt2"),
    Tiny("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Tiny("helium"),
    Tiny("exaone4", SLIDING, WINDOWED),
    Tiny("ernie4_5"),
    Tiny("hunyuan_v1_dense"),
    Tiny("seed_oss"),
    Tiny("apertus"),
    Tiny("arcee"),
]


def build(tiny: Tiny, seed: int) -> LoadedModel:
    """Make the model with random weights from `seed`, in fp32 on the CPU."""
    quieten_transformers()
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[tiny.model_type](**(COMMON | tiny.extra))
    check_config(config)
    factory: Any = AutoModelForCausalLM
    module = factory.from_config(config, attn_implementation=ATTENTION_NAME)
    module = module.float().eval()
    module.generation_config.eos_token_id = None
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("sinks"):
                weight.uniform_(0.5, 2.0)
            elif ("attn" in name or "attention" in name) and weight.ndim >= 2:
                weight.mul_(ATTENTION_SCALE)
        module.get_output_embeddings().weight.mul_(OUTPUT_SCALE)
    text = text_config(config)
    return LoadedModel(
        module=module,
        config=config,
        architecture=architecture_of(config),
        weight_digest=f"random {seed}",
        tokenizer_digest="",
        eos_token_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
        num_layers=int(text.num_hidden_layers),
    )
