"""What changes logits, on the default model through real processes, against transformers' `generate` on the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pdserve.client import Options
from tests.e2e.cluster import start_cluster
from tests.e2e.request_oracle import Asked, generated, log_probabilities
from tests.goldens.model import default_model_dir

pytestmark = [pytest.mark.e2e, pytest.mark.smollm2, pytest.mark.asyncio, pytest.mark.deep]

MODEL = "smollm2-135m-instruct"
PROMPT = "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n"
NUM_TOKENS = 32


async def test_processors_logprobs_and_stops_on_the_default_model(tmp_path: Path) -> None:
    folder = default_model_dir()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    eos = tokenizer.encode("<|im_end|>").ids[0]
    words = ("Danube", "Rhine")
    ways = [tokenizer.encode(text, add_special_tokens=False).ids for word in words for text in (word, f" {word}")]
    bias = {eos: 8.0, 28: -3.0}
    asked = Asked(
        repetition_penalty=1.15,
        logit_bias=bias,
        banned_words=tuple(tuple(way) for way in ways),
        min_tokens=12,
        presence_penalty=0.4,
        frequency_penalty=0.2,
    )
    options = Options(
        max_tokens=NUM_TOKENS,
        repetition_penalty=1.15,
        logit_bias=bias,
        banned_words=words,
        min_tokens=12,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        top_logprobs=3,
    )
    expected = generated(folder, prompt, NUM_TOKENS, asked, eos)
    assert expected != generated(folder, prompt, NUM_TOKENS, Asked(), eos), "the parameters must matter"
    async with start_cluster(MODEL, tmp_path) as cluster:
        answer = await cluster.answer(tuple(prompt), options)
        assert answer.token_ids == expected
        assert not any(word in answer.text for word in words)
        scores = log_probabilities(folder, [*prompt, *expected])[len(prompt) - 1 :]
        [choice] = answer.choices
        for row, token_id, logprob, top in zip(scores, expected, choice.logprobs, choice.top_logprobs, strict=False):
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            assert [value for _, value in top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        stop = answer.text[-12:-6]
        assert answer.text.index(stop) == len(answer.text) - 12, "it must stand behind min_tokens, and once"
        cut = await cluster.answer(tuple(prompt), replace(options, stop=(stop,), n=2))
        assert [choice.text for choice in cut.choices] == [answer.text[:-12]] * 2
        await cluster.leak_oracle()
