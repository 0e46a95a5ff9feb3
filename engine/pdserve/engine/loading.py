"""A Hugging Face folder becomes a model in memory, with what identifies it."""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from pdserve.core.errors import ModelUnavailable, ModelUnsupported
from pdserve.core.models import MANIFEST_NAME
from pdserve.engine.attention import ATTENTION_NAME
from pdserve.engine.kv_pool import TORCH_DTYPES
from pdserve.engine.quiet import quieten_transformers
from pdserve.engine.support import architecture_of, check_config, text_config
from pdserve.engine.weights import file_digest, weight_digest


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its attention led to `ATTENTION_NAME`."""

    module: torch.nn.Module
    config: PreTrainedConfig
    architecture: str
    weight_digest: str
    tokenizer_digest: str
    eos_token_ids: frozenset[int]
    vocab_size: int
    num_layers: int


def load_model(folder: Path, dtype: str, device: torch.device) -> LoadedModel:
    """Read a model folder; raise ModelUnavailable (unreadable, damaged) or ModelUnsupported (refused by name)."""
    quieten_transformers()
    config = _read_config(folder)
    check_config(config)
    digest = weight_digest(folder)
    _check_manifest(folder)
    module = _read_module(folder, config, dtype).to(device=device).eval()
    text = text_config(config)
    tokenizer = folder / "tokenizer.json"
    return LoadedModel(
        module=module,
        config=config,
        architecture=architecture_of(config),
        weight_digest=digest,
        tokenizer_digest=sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else "",
        eos_token_ids=eos_token_ids(folder, text),
        vocab_size=int(text.vocab_size),
        num_layers=int(text.num_hidden_layers),
    )


def eos_token_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Return the ids that end a sequence: those of generation_config.json, else those of the model's config."""
    file = folder / "generation_config.json"
    stated = None
    if file.is_file():
        try:
            stated = json.loads(file.read_text()).get("eos_token_id")
        except (OSError, json.JSONDecodeError) as error:
            raise ModelUnavailable(f"cannot read {file}: {error}") from error
    if stated is None:
        stated = config.eos_token_id
    return frozenset() if stated is None else frozenset([stated] if isinstance(stated, int) else stated)


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelUnavailable(
            f"cannot read the config of {folder}: {error}", hint="is it a Hugging Face folder?"
        ) from error
    return config


def _read_module(folder: Path, config: PreTrainedConfig, dtype: str) -> torch.nn.Module:
    try:
        # With output_loading_info the answer is a pair, which the declared type does not know.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
        module: torch.nn.Module
        report: dict[str, list[str]]
        module, report = loaded
    except ValueError as error:
        raise ModelUnsupported(
            f"transformers cannot load {architecture_of(config)} for paged attention: {error}"
        ) from error
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelUnavailable(f"cannot read the weights of {folder}: {error}") from error
    # transformers fills such weights with random numbers and goes on.
    absent = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
    if absent:
        raise ModelUnavailable(
            f"{folder} lacks {len(absent)} weights of {architecture_of(config)}: {', '.join(absent[:3])} …"
        )
    return module


def _check_manifest(folder: Path) -> None:
    """Compare a prepared model with what its preparation wrote down."""
    file = folder / MANIFEST_NAME
    if not file.is_file():
        return
    try:
        manifest = json.loads(file.read_text())
        name, stated = str(manifest["model"]), dict(manifest["files"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelUnavailable(
            f"cannot read {file}: {error}", hint="run `pdserve pull --force` on the model"
        ) from error
    for part, digest in stated.items():
        if not (folder / part).is_file() or file_digest(folder / part) != digest:
            raise ModelUnavailable(f"{folder / part} is damaged", hint=f"run `pdserve pull --force {name}`")
