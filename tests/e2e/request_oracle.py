"""What plain `transformers` answers to a request with everything that changes logits, on the tiny model or another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.e2e.tiny_model import EOS_ID, LEAST_MARGIN, Undecided, _reference


@dataclass(frozen=True)
class Asked:
    """Parameters as `generate` has them; the last two are a processor of the caller's own there."""

    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    allowed: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class CountPenalty:
    """OpenAI's presence and frequency penalties, over the output alone."""

    def __init__(self, asked: Asked, num_prompt: int) -> None:
        self._asked, self._num_prompt = asked, num_prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, self._num_prompt :], minlength=scores.shape[-1]).to(scores)
        return scores - self._asked.frequency_penalty * counts - self._asked.presence_penalty * (counts > 0)


@torch.inference_mode()
def generated(folder: Path, prompt: list[int], num_tokens: int, asked: Asked, eos_id: int = EOS_ID) -> list[int]:
    """Return the greedy tokens of `generate`; fails on a close call."""
    given: dict[str, Any] = {}
    if asked.repetition_penalty != 1.0:
        given["repetition_penalty"] = asked.repetition_penalty
    if asked.logit_bias:
        given["sequence_bias"] = [[[token], value] for token, value in asked.logit_bias.items()]
    if asked.banned_words:
        given["bad_words_ids"] = [list(ids) for ids in asked.banned_words]
    if asked.min_tokens:
        given["min_new_tokens"] = asked.min_tokens
    if asked.allowed:
        given["prefix_allowed_tokens_fn"] = lambda *_: list(asked.allowed)
    if asked.banned:
        given["suppress_tokens"] = list(asked.banned)
    if asked.presence_penalty or asked.frequency_penalty:
        given["logits_processor"] = [CountPenalty(asked, len(prompt))]
    out = _reference(folder).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=eos_id,
        eos_token_id=eos_id,
        **given,
    )
    for scores in out.scores:
        best, second = scores[0].topk(2).values.tolist()
        if best - second < LEAST_MARGIN:
            raise Undecided(f"margin {best - second:.1e}: choose another prompt")
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def log_probabilities(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return log-probabilities [position, vocabulary]: row i is what the model thinks of the token at i + 1."""
    logits: torch.Tensor = _reference(folder)(torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)
