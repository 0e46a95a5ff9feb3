"""What plain `transformers` says: the tokens and logits of its own `generate`, with its own attention and cache."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.attention import ATTENTION_NAME
from pdserve.engine.loading import LoadedModel
from tests.architectures.tiny import VOCAB_SIZE, Tiny, build

PROMPT_LENGTHS = (11, 5, 17)
NUM_NEW_TOKENS = 10
LEAST_MARGIN = 1e-3
MOST_SEEDS = 12


@dataclass(frozen=True)
class Reference:
    """Per prompt: its ids, the tokens chosen, and the logits they were chosen from [new tokens, vocabulary]."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    margin: float
    """Least distance between the two best logits at any step."""


def model_with_reference(tiny: Tiny) -> tuple[LoadedModel, Reference]:
    """Return a model whose best logit is clear at every step, with its reference; AssertionError if no seed gives one."""
    for seed in range(MOST_SEEDS):
        model = build(tiny, seed)
        reference = compute(model, seed)
        if reference.margin >= LEAST_MARGIN:
            return model, reference
    raise AssertionError(f"{tiny.model_type}: no seed below {MOST_SEEDS} keeps the two best logits apart")


def compute(model: LoadedModel, seed: int) -> Reference:
    """Run `generate` with eager attention on each prompt alone."""
    module: Any = model.module
    module.set_attn_implementation("eager")
    try:
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(3, VOCAB_SIZE, (1, length), generator=generator) for length in PROMPT_LENGTHS]
        answers = [
            module.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NUM_NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            for prompt in prompts
        ]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    logits = tuple(torch.cat(answer.logits).float() for answer in answers)
    best = [rows.topk(2, dim=-1).values for rows in logits]
    return Reference(
        prompts=tuple(tuple(prompt[0].tolist()) for prompt in prompts),
        tokens=tuple(
            tuple(answer.sequences[0, prompt.shape[1] :].tolist())
            for prompt, answer in zip(prompts, answers, strict=True)
        ),
        logits=logits,
        margin=min(float((top[:, 0] - top[:, 1]).min()) for top in best),
    )
