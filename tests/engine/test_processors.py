"""Every sampling parameter at once on an engine: alone, batched, split, resumed; prompt scores and alternatives."""

from collections.abc import Sequence

import pytest
import torch

from pdserve.core.work import Sampling, TokenScore
from pdserve.engine.batch import Chosen, RowFailed, SampledRow, SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import RowState
from tests.engine.small import GREEDY, GREEDY_ROW, first_choices, model_of, prompt_of, small_engine
from tests.kernels.generate_order import processors_of_generate

VOCAB = 199
END_IDS = frozenset({17, 60})
MIN_TOKENS = 9


def everything(seed: int, temperature: float = 1.3) -> Sampling:
    """Every parameter on, each differently per seed."""
    return Sampling(
        temperature=temperature,
        top_k=90 + seed,
        top_p=0.97,
        min_p=0.001,
        seed=seed,
        repetition_penalty=1.1 + seed / 20,
        presence_penalty=0.3,
        frequency_penalty=0.2 * (seed % 3),
        logit_bias=((3 + seed, 1.5), (60, 4.0), (99, -2.0)),
        allowed_token_ids=frozenset(range(seed, 199, 2)) | frozenset(range(0, 199, 3)),
        banned_token_ids=frozenset(range(5 * seed, 5 * seed + 20)),
        banned_sequences=((7,), *((first, second) for first in range(0, 199, 4) for second in range(0, 199, 5))),
    )


class Request:
    """One sequence with a state that grows, or that was rebuilt from `output`."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], sampling: Sampling, first_block: int, output: Sequence[int] = ()
    ) -> None:
        self.prompt, self.output, self.sampling = tuple(prompt), list(output), sampling
        self.state = RowState(sampling, self.prompt, self.output, END_IDS, MIN_TOKENS)
        self.block_ids = list(range(first_block, first_block + 64 // engine.block_size + 1))
        self.num_computed = 0

    def next_chunk(self, budget: int) -> SequenceChunk:
        known = (*self.prompt, *self.output)
        start, stop = self.num_computed, min(len(known), self.num_computed + budget)
        self.num_computed = stop
        row = SampledRow(self.sampling, 1, len(self.output), 2, self.state)
        return SequenceChunk(known[start:stop], start, self.block_ids, (row,) if stop == len(known) else ())


def run(engine: Engine, requests: Sequence[Request], num_tokens: int, budget: int = 1 << 30) -> list[list[int]]:
    while pending := [request for request in requests if len(request.output) < num_tokens]:
        choices = first_choices(engine.step([request.next_chunk(budget) for request in pending]))
        for request, choice in zip(pending, choices, strict=True):
            if choice is not None:
                assert isinstance(choice, Chosen), choice.reason
                request.output.append(choice.token_id)
                request.state.accept(choice.token_id)
    return [request.output for request in requests]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_with_every_parameter_on_tokens_are_the_same_alone_in_a_batch_split_and_resumed(temperature: float) -> None:
    """Failure classes 19 and 32: the state of penalties, bans and minimum lengths is in the token ids."""
    num_tokens = 24
    samplings = [everything(seed, temperature) for seed in range(5)]
    prompts = [prompt_of(7 + index, index) for index in range(5)]
    pairs = list(zip(prompts, samplings, strict=True))
    alone = [run(engine := small_engine(), [Request(engine, *pair, 0)], num_tokens)[0] for pair in pairs]
    assert len({tuple(output) for output in alone}) == 5
    engine = small_engine(num_blocks=90)
    assert run(engine, [Request(engine, *pair, 17 * n) for n, pair in enumerate(pairs)], num_tokens) == alone
    engine = small_engine(num_blocks=90)
    assert run(engine, [Request(engine, *pair, 17 * n) for n, pair in enumerate(pairs)], num_tokens, budget=3) == alone
    for kept in (1, MIN_TOKENS - 1, 15):
        engine = small_engine(block_size=7, num_blocks=50)
        resumed = [Request(engine, *pair, 10 * n, alone[n][:kept]) for n, pair in enumerate(pairs)]
        assert run(engine, resumed, num_tokens, budget=4) == alone


@torch.inference_mode()
def test_greedy_tokens_are_those_of_the_processors_of_generate() -> None:
    """The model's own forward over all tokens at every step, then the processors that `generate` composes."""
    sampling, prompt = everything(2, temperature=0.0), prompt_of(9)
    engine = small_engine()
    [ours] = run(engine, [Request(engine, prompt, sampling, 0)], 20)
    plain = small_engine(block_size=64, num_blocks=2)
    processors = processors_of_generate(sampling, len(prompt), END_IDS, MIN_TOKENS)
    expected: list[int] = []
    while len(expected) < 20:
        ids = (*prompt, *expected)
        scores = plain.logits([SequenceChunk(ids, 0, [0], GREEDY_ROW)])
        for processor in processors:
            scores = processor(torch.tensor([ids]), scores)
        expected.append(int(scores.argmax()))
    assert ours == expected
    [free] = run(engine := small_engine(), [Request(engine, prompt, GREEDY, 0)], 20)
    assert ours != free  # the parameters do have a say


def test_sequences_of_one_prompt_draw_from_the_same_logits() -> None:
    """n answers: the row after the prompt is computed once, and each sequence has the noise of its own number."""
    engine = small_engine()
    sampling = Sampling(1.5, seed=4)
    rows = tuple(SampledRow(sampling, sequence, 0) for sequence in range(6))
    prompt = prompt_of(11)
    [together] = engine.step([SequenceChunk(prompt, 0, [0, 1, 2], rows)]).chunks
    alone = [engine.step([SequenceChunk(prompt, 0, [4, 5, 6], (row,))]).chunks[0].choices[0] for row in rows]
    assert [_token(choice) for choice in together.choices] == [_token(choice) for choice in alone]
    assert len({_token(choice) for choice in together.choices}) > 2
    assert engine.logits([SequenceChunk(prompt, 0, [0, 1, 2], rows)]).shape == (6, VOCAB)


def _token(choice: Chosen | RowFailed) -> int:
    assert isinstance(choice, Chosen)
    return choice.token_id


def test_a_row_that_allows_nothing_fails_its_own_sequence_only() -> None:
    engine = small_engine()
    nothing = Sampling(allowed_token_ids=frozenset({4}), banned_token_ids=frozenset({4}))
    prompts = [prompt_of(9, index) for index in range(3)]
    chunks = [SequenceChunk(prompt, 0, [3 * n, 3 * n + 1, 3 * n + 2], GREEDY_ROW) for n, prompt in enumerate(prompts)]
    expected = first_choices(engine.step(chunks))
    row = SampledRow(nothing, 0, 0, state=RowState(nothing, prompts[1], ()))
    chunks[1] = SequenceChunk(prompts[1], 0, chunks[1].block_ids, (row,))
    first, failed, last = first_choices(engine.step(chunks))
    assert isinstance(failed, RowFailed)
    assert "no token is allowed" in failed.reason
    assert [first, last] == [expected[0], expected[2]]


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 23])
@pytest.mark.parametrize("num_top", [0, 4])
def test_prompt_scores_are_the_models_own_however_the_prompt_is_cut(budget: int, num_top: int) -> None:
    prompt = prompt_of(23)
    expected = _model_logprobs("qwen3", prompt)
    engine = small_engine()
    scores: list[TokenScore] = []
    for start in range(0, len(prompt), budget):
        stop = min(len(prompt), start + budget)
        # Something else in the step, so that rows are looked for in the right place.
        neighbour = SequenceChunk(prompt_of(5, 3), 0, [20, 21], GREEDY_ROW * 2, prompt_of(4, 3)[1:])
        chunk = SequenceChunk(
            prompt[start:stop],
            start,
            list(range(8)),
            GREEDY_ROW if stop == len(prompt) else (),
            prompt[start + 1 : stop + 1],
            num_top,
        )
        before, result = engine.step([neighbour, chunk]).chunks
        assert len(before.choices) == 2
        assert len(before.scores) == 3
        assert len(result.choices) == (stop == len(prompt))
        scores += result.scores
    assert len(scores) == len(prompt) - 1
    for index, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[index, prompt[index + 1]]), abs=1e-4)
        values, ids = torch.topk(expected[index], max(num_top, 1))
        assert [token for token, _ in score.top] == ids.tolist()[:num_top]
        assert [logprob for _, logprob in score.top] == pytest.approx(values.tolist()[:num_top], abs=1e-4)


@torch.inference_mode()
def _model_logprobs(model_type: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [prompt, vocabulary] of the model's last rows, each from a plain forward of its own prefix."""
    engine = small_engine(model_type, block_size=64, num_blocks=2)
    rows = [engine.logits([SequenceChunk(prompt[:stop], 0, [0], GREEDY_ROW)])[0] for stop in range(1, len(prompt) + 1)]
    return torch.log_softmax(torch.stack(rows), dim=-1)


def test_scores_that_cannot_be_are_refused() -> None:
    engine = Engine(model_of("qwen3"), dtype="float32", device="cpu", block_size=4, num_blocks=4)
    with pytest.raises(ValueError, match="3 ids are to be scored after 2 tokens"):
        engine.step([SequenceChunk((1, 2), 0, [0], scored_ids=(1, 2, 3))])
    with pytest.raises(ValueError, match="scored id lies outside"):
        engine.step([SequenceChunk((1, 2), 0, [0], scored_ids=(VOCAB,))])
