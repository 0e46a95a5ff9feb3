"""A tiny random model as a Hugging Face folder, for tests that need real processes but no sense in the answers.

Byte-level tokenizer, chat template, weights scaled so that the two best logits stay apart. `expected_tokens` is the parity
oracle: plain `transformers` on the same folder.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 0
MAX_LEN = 1024
LEAST_MARGIN = 1e-3
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Undecided(AssertionError):
    """The two best logits are too close for a token oracle."""


def write_tiny_model(folder: Path, *, seed: int = 0, chat: bool = True) -> Path:
    """Write the model into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0]}
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.set_num_threads(1)  # the processes under test need the other core
    make: Any = LlamaForCausalLM
    model = make(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(6.0)
            if "lm_head" in name:
                weight.mul_(12.0)
        model.lm_head.weight[EOS_ID] = 0.0  # never the largest: answers end by length, unless a test names a stop
    model.save_pretrained(folder)
    return folder


@cache
def _reference(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def prompt_ids(text: str) -> list[int]:
    """Return the ids of `text` under the tiny tokenizer."""
    ids: list[int] = _byte_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@torch.inference_mode()
def expected_tokens(folder: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of plain `transformers` and their log-probabilities; fails on a close call."""
    model = _reference(folder)
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=EOS_ID,
    )
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    logprobs = []
    for token, logits in zip(tokens, out.logits, strict=True):
        best, second = logits[0].topk(2).values.tolist()
        if best - second < LEAST_MARGIN:
            raise Undecided(f"margin {best - second:.1e}: choose another prompt")
        logprobs.append(float(logits[0].log_softmax(-1)[token]))
    return tokens, logprobs


def decided_prompts(folder: Path, number: int, length: int, num_tokens: int) -> list[list[int]]:
    """Return prompts of `length` ids whose greedy answers are never a close call."""
    found: list[list[int]] = []
    for seed in range(100 * number):
        prompt = [3 + (seed * 31 + 11 * i + i * i * (seed + 1)) % 256 for i in range(length)]
        try:
            expected_tokens(folder, prompt, num_tokens)
        except Undecided:
            continue
        found.append(prompt)
        if len(found) == number:
            return found
    raise Undecided(f"no {number} prompts of {length} ids")


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer
