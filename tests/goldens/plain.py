"""Plain `transformers`: the reference that the goldens are computed with. Nothing of pdserve's engine is used here."""

import platform
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from tests.goldens.goldens import MAX_NEW_TOKENS, Golden
from tests.goldens.prompts import Prompt


class PlainModel:
    """A model folder in fp32 with transformers' own attention, cache and greedy `generate`."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the prompt's ids: of the text as it is, or of the chat through the model's template."""
        if prompt.messages is not None:
            rendered = self._tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, tokenize=False
            )
            return tuple(self._tokenizer(rendered, add_special_tokens=False).input_ids)
        return tuple(self._tokenizer(prompt.text).input_ids)

    def answer(self, name: str, prompt: Prompt, least_margin: float = 0.0) -> Golden:
        """Run `generate`; stop early, as not worth finishing, once the two best logits are closer than `least_margin`."""
        ids = self.encode(prompt)
        inputs = torch.tensor([ids])
        output = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
            stopping_criteria=StoppingCriteriaList([_TooClose(least_margin)]),
        )
        tokens = output.sequences[0, len(ids) :]
        logits = torch.cat(output.logits).float()
        best = logits.topk(2, dim=-1).values
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
        return Golden(
            name=name,
            text=prompt.text,
            messages=prompt.messages,
            prompt_ids=ids,
            tokens=tuple(tokens.tolist()),
            logprobs=tuple(round(value, 6) for value in logprobs.tolist()),
            margins=tuple(round(value, 4) for value in (best[:, 0] - best[:, 1]).tolist()),
        )


class _TooClose(StoppingCriteria):
    def __init__(self, least_margin: float) -> None:
        self._least_margin = least_margin

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...], **kwargs: object) -> torch.Tensor:
        best = scores[-1].topk(2, dim=-1).values
        return best[:, 0] - best[:, 1] < self._least_margin


def versions() -> dict[str, str]:
    """Return what the numbers were made with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "machine": platform.machine(),
    }
