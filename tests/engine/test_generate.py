"""SmolLM2 with sampling parameters: the engine's tokens and scores are those of transformers' `generate` and forward."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.core.work import Sampling, TokenScore
from pdserve.engine.batch import Chosen, SampledRow, SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import RowState
from tests.engine.small import first_choices
from tests.goldens.goldens import load_goldens
from tests.goldens.model import default_model_dir
from tests.kernels.generate_order import OutputPenalties

pytestmark = pytest.mark.smollm2

NUM_TOKENS = 24
BLOCKS = list(range(12))
TOLERANCE = 1e-4


@cache
def engine() -> Engine:
    return Engine.load(default_model_dir(), threads=1, block_size=16, num_blocks=len(BLOCKS))


@cache
def plain_model() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32)
    return model.eval()


def prompt_and_answer() -> tuple[tuple[int, ...], tuple[int, ...]]:
    golden = next(golden for golden in load_goldens().goldens if 20 <= len(golden.prompt_ids) < 100)
    return golden.prompt_ids, golden.tokens


def ours(prompt: tuple[int, ...], sampling: Sampling, min_tokens: int) -> list[int]:
    """Generate alone, greedily, to NUM_TOKENS or an end-of-sequence token."""
    state = RowState(sampling, prompt, (), engine().eos_token_ids, min_tokens)
    output: list[int] = []
    chunk_ids, start = prompt, 0
    while len(output) < NUM_TOKENS and not engine().eos_token_ids.intersection(output):
        row = SampledRow(sampling, 0, len(output), state=state)
        [choice] = first_choices(engine().step([SequenceChunk(chunk_ids, start, BLOCKS, (row,))]))
        assert isinstance(choice, Chosen)
        output.append(choice.token_id)
        state.accept(choice.token_id)
        chunk_ids, start = (choice.token_id,), start + len(chunk_ids)
    return output


def test_tokens_are_those_of_generate_with_its_own_processors() -> None:
    prompt, answer = prompt_and_answer()
    eos = sorted(engine().eos_token_ids)
    sampling = Sampling(
        repetition_penalty=1.15,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((answer[0], -3.0), (eos[0], 6.0)),
        banned_token_ids=frozenset(answer[3:8]),
        banned_sequences=((answer[1],), *((first, second) for first in answer for second in answer[8:12])),
    )
    expected = (
        plain_model()
        .generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            sequence_bias=[[[token], value] for token, value in sampling.logit_bias],
            repetition_penalty=sampling.repetition_penalty,
            bad_words_ids=[list(ids) for ids in sampling.banned_sequences],
            suppress_tokens=sorted(sampling.banned_token_ids),
            min_new_tokens=16,
            eos_token_id=eos,
            pad_token_id=0,
            logits_processor=[OutputPenalties(len(prompt), sampling.presence_penalty, sampling.frequency_penalty)],
        )[0, len(prompt) :]
        .tolist()
    )
    assert ours(prompt, sampling, min_tokens=16) == expected
    assert expected != list(answer[: len(expected)])
    assert len(expected) >= 16


def test_prompt_scores_and_alternatives_are_those_of_transformers() -> None:
    prompt, answer = prompt_and_answer()
    ids = prompt + answer
    with torch.inference_mode():
        expected = torch.log_softmax(plain_model()(torch.tensor([ids])).logits[0], dim=-1)
    scores: list[TokenScore] = []
    for start in range(0, len(ids), 37):
        chunk = SequenceChunk(ids[start : start + 37], start, BLOCKS, scored_ids=ids[start + 1 : start + 38], num_top=5)
        scores += engine().step([chunk]).chunks[0].scores
    assert len(scores) == len(ids) - 1
    for index, score in enumerate(scores):
        values, _ = torch.topk(expected[index], 5)
        assert score.logprob == pytest.approx(float(expected[index, ids[index + 1]]), abs=TOLERANCE)
        assert [logprob for _, logprob in score.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
        for token, logprob in score.top:
            assert logprob == pytest.approx(float(expected[index, token]), abs=TOLERANCE)
