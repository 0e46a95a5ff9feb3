"""transformers' own processors for a `Sampling`, in the order in which its `generate` itself puts them."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerationMixin

from pdserve.core.work import Sampling


class OutputPenalties(LogitsProcessor):
    """OpenAI's penalties: presence once, frequency per occurrence, of ids in the output; a custom processor to `generate`."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self._prompt_len, self._presence, self._frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        (output,) = input_ids[:, self._prompt_len :]
        counts = torch.bincount(output, minlength=scores.shape[-1]).float()
        penalties = counts * self._frequency + (counts > 0) * self._presence
        return scores - penalties  # type: ignore[return-value]  # torch's stubs widen it


def _untyped(some: Any) -> Any:
    return some


def processors_of_generate(
    sampling: Sampling, prompt_len: int, end_ids: frozenset[int] = frozenset(), min_tokens: int = 0
) -> list[Any]:
    """Return the list that `generate` would build, filters included if it samples."""
    config: Any = _untyped(GenerationConfig)(
        sequence_bias=[[[token], value] for token, value in sampling.logit_bias] or None,
        repetition_penalty=sampling.repetition_penalty,
        bad_words_ids=[list(ids) for ids in sampling.banned_sequences] or None,
        min_new_tokens=min_tokens or None,
        suppress_tokens=sorted(sampling.banned_token_ids) or None,
        do_sample=not sampling.is_greedy,
        temperature=sampling.temperature or None,
        top_k=sampling.top_k or None,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
        eos_token_id=sorted(end_ids) or None,
    )
    config._eos_token_tensor = torch.tensor(sorted(end_ids)) if end_ids else None
    custom = LogitsProcessorList()
    if sampling.presence_penalty or sampling.frequency_penalty:
        custom.append(OutputPenalties(prompt_len, sampling.presence_penalty, sampling.frequency_penalty))
    allowed = sorted(sampling.allowed_token_ids)
    model: Any = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda ours, theirs: GenerationMixin._merge_criteria_processor_list(
            model, ours, theirs
        ),
    )
    config.num_beams = config.num_return_sequences = 1
    return list(
        GenerationMixin._get_logits_processor(
            model,
            config,
            input_ids_seq_length=prompt_len,
            prefix_allowed_tokens_fn=(lambda *_: allowed) if allowed else None,
            logits_processor=custom,
            device="cpu",
        )
    )
