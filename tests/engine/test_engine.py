"""The engine's promises: however work is cut and mixed, the answers are the same; one forward per step; layers in order."""

from itertools import pairwise

import pytest
import torch

from pdserve.core.errors import ConfigError, InternalError
from pdserve.core.work import Sampling
from pdserve.engine.batch import Chosen, ChunkResult, RowFailed, SequenceChunk, StepResult
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import SampledRow
from tests.engine.small import (
    GREEDY,
    GREEDY_ROW,
    Generation,
    first_choices,
    generate,
    model_of,
    prompt_logits,
    prompt_of,
    small_engine,
)

ATOL = 2e-5


def test_mixed_ragged_steps_equal_one_at_a_time() -> None:
    prompts = [prompt_of(length, length) for length in (17, 1, 9, 12)]
    alone = []
    for prompt in prompts:
        engine = small_engine()
        generation = Generation(engine, prompt, 0)
        generate(engine, [generation], 8)
        alone.append(generation.output)
    engine = small_engine()
    mixed = [Generation(engine, prompt, 10 * index) for index, prompt in enumerate(prompts)]
    generate(engine, mixed[:2], 3)  # the later ones join while the first already decode
    generate(engine, mixed, 8, budget=5)
    assert [generation.output for generation in mixed] == alone


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 22, 23])
def test_chunks_of_any_size_give_the_same_logits(budget: int) -> None:
    prompt = prompt_of(23)
    whole = prompt_logits(small_engine(), prompt, len(prompt))
    torch.testing.assert_close(prompt_logits(small_engine(), prompt, budget), whole, atol=ATOL, rtol=0)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64])
def test_block_sizes_give_the_same_logits(block_size: int) -> None:
    prompt = prompt_of(33)
    expected = prompt_logits(small_engine(), prompt, 9)
    engine = small_engine(block_size=block_size)
    torch.testing.assert_close(prompt_logits(engine, prompt, 9), expected, atol=ATOL, rtol=0)


def test_a_step_is_one_forward_whatever_it_holds() -> None:
    engine = small_engine()
    generations = [Generation(engine, prompt_of(5 + index, index), 5 * index) for index in range(8)]
    generate(engine, generations[:4], 1)
    assert engine.num_forwards == 1
    # Four decode rows, two whole prompts and two first chunks in one step.
    chunks = [generation.next_chunk() for generation in generations[:6]] + [
        generation.next_chunk(3) for generation in generations[6:]
    ]
    result = engine.step(chunks)
    assert engine.num_forwards == 2
    assert [choice is None for choice in first_choices(result)] == [False] * 6 + [True] * 2


def test_sixteen_sequences_of_64_tokens_take_as_many_forwards_as_one() -> None:
    engine = small_engine("llama", block_size=16, num_blocks=64)
    generations = [Generation(engine, prompt_of(8, index), 4 * index) for index in range(16)]
    generate(engine, generations, 50)
    assert engine.num_forwards == 50


def test_layers_are_reported_when_written_and_before_the_next_runs() -> None:
    engine = small_engine("llama")
    prompt = prompt_of(6)
    layers = range(engine.layout.num_layers)
    seen: list[list[bool]] = []

    def on_layer(layer: int) -> None:
        assert layer == len(seen)
        filled = []
        for other in layers:
            wire = bytearray(engine.layout.range_bytes(range(other, other + 1), len(prompt)))
            engine.pack(range(other, other + 1), [7, 8], range(len(prompt)), memoryview(wire))
            filled.append(any(wire))
        seen.append(filled)

    engine.step([SequenceChunk(prompt, 0, [7, 8], GREEDY_ROW)], on_layer)
    assert seen == [[other <= layer for other in layers] for layer in layers]


def test_a_chunk_without_samples_answers_nothing_and_a_step_of_nothing_nothing() -> None:
    engine = small_engine()
    assert engine.step([SequenceChunk(prompt_of(3), 0, [0])]) == StepResult((ChunkResult(),))
    assert engine.step([]) == StepResult(())


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    engine = small_engine()
    prompt = prompt_of(9)
    expected = torch.log_softmax(prompt_logits(engine, prompt, 9), dim=-1)
    sampling = Sampling(temperature=2.0, top_k=50, seed=3)
    (answer,) = first_choices(engine.step([SequenceChunk(prompt, 0, [20, 21, 22], (SampledRow(sampling, 0, 0),))]))
    assert isinstance(answer, Chosen)
    assert answer.logprob == pytest.approx(float(expected[answer.token_id]), abs=1e-5)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_p=0.9, min_p=0.05, seed=4)])
def test_broken_kv_fails_its_own_sequence_only(sampling: Sampling) -> None:
    """One request's NaN ended every request of its step."""
    engine = small_engine()
    generations = [Generation(engine, prompt_of(9, index), 10 * index, sampling) for index in range(3)]
    generate(engine, generations, 2)
    expected = [generation.output for generation in generations]
    engine = small_engine()
    generations = [Generation(engine, prompt_of(9, index), 10 * index, sampling) for index in range(3)]
    generate(engine, generations, 1)
    engine.poison(generations[1].block_ids[:1])
    first, broken, last = first_choices(engine.step([generation.next_chunk() for generation in generations]))
    assert isinstance(broken, RowFailed)
    generations[0].accept(first)
    generations[2].accept(last)
    assert [generations[0].output, generations[2].output] == [expected[0], expected[2]]


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_after_a_resume() -> None:
    """Failure classes 19 and 32."""
    num_tokens = 24
    samplings = [Sampling(temperature=1.2, top_k=40 * (index % 2), top_p=0.97, seed=index // 2) for index in range(6)]
    prompts = [prompt_of(7, index // 3) for index in range(6)]
    alone = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        engine = small_engine()
        generation = Generation(engine, prompt, 0, sampling)
        generate(engine, [generation], num_tokens)
        alone.append(generation.output)
    assert len({tuple(output) for output in alone}) == 6  # seeds, prompts and filters all tell
    engine = small_engine(num_blocks=80)
    batch = [
        Generation(engine, prompt, 10 * index, sampling)
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    generate(engine, batch, num_tokens)
    assert [generation.output for generation in batch] == alone
    # Another engine, another block size: prompt and output so far are computed again, in chunks.
    engine = small_engine(block_size=7, num_blocks=80)
    resumed = [
        Generation(engine, prompt, 10 * index, sampling, output[: 3 + index])
        for index, (prompt, sampling, output) in enumerate(zip(prompts, samplings, alone, strict=True))
    ]
    generate(engine, resumed, num_tokens, budget=4)
    assert [generation.output for generation in resumed] == alone


def test_kv_moves_between_block_sizes_in_pieces_and_windows_need_only_their_window() -> None:
    prompt = prompt_of(30)
    source, sink = small_engine(block_size=4), small_engine(block_size=9, num_blocks=9)
    expected = Generation(source, prompt, 2)
    generate(source, [expected], 1)
    there = Generation(sink, prompt, 3, output=expected.output)
    sink.poison(range(sink.num_blocks))
    for layer in range(source.layout.num_layers):
        first = source.layout.layers[layer].first_needed_token(len(prompt))
        for start, stop in pairwise([first, first + 1, first + 4, len(prompt)]):
            wire = bytearray(source.layout.range_bytes(range(layer, layer + 1), stop - start))
            source.pack(range(layer, layer + 1), expected.block_ids, range(start, stop), memoryview(wire))
            sink.unpack(range(layer, layer + 1), there.block_ids, range(start, stop), memoryview(wire))
    assert source.layout.layers[0].first_needed_token(len(prompt)) > 0
    there.num_computed = len(prompt)
    generate(source, [expected], 10)
    generate(sink, [there], 10)
    assert there.output == expected.output


def test_a_wrong_payload_size_is_refused() -> None:
    engine = small_engine()
    size = engine.layout.range_bytes(range(2), 3)
    for wrong in (size - 1, size + 4):
        with pytest.raises(ValueError, match="bytes"):
            engine.unpack(range(2), [0, 1], range(3), memoryview(bytes(wrong)))
        with pytest.raises(ValueError, match="bytes"):
            engine.pack(range(2), [0, 1], range(3), memoryview(bytearray(wrong)))
    with pytest.raises(ValueError, match="bytes"):
        engine.pack(range(2), [0], range(3, 6), memoryview(bytearray(size)))  # the table ends at position 3


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (SequenceChunk((), 0, [0]), "at least one token"),
        (SequenceChunk((1,), -1, [0]), "from position 0"),
        (SequenceChunk((1,) * 5, 0, [0]), "need 2 blocks"),
        (SequenceChunk((1,), 64, list(range(17))), "beyond the model's length of 64"),
        (SequenceChunk((1,), 0, [40]), "outside the pool"),
        (SequenceChunk((199,), 0, [0]), "outside the vocabulary"),
        (SequenceChunk((-1,), 0, [0]), "outside the vocabulary"),
    ],
)
def test_chunks_that_do_not_fit_are_refused_before_the_forward(chunk: SequenceChunk, message: str) -> None:
    engine = small_engine()
    with pytest.raises(ValueError, match=message):
        engine.step([chunk])
    assert engine.num_forwards == 0
    assert first_choices(engine.step([SequenceChunk((1,), 0, [0], GREEDY_ROW)])) != [None]


def test_a_step_inside_a_step_is_a_fault_of_ours() -> None:
    engine = small_engine()
    chunk = SequenceChunk((1, 2), 0, [0], GREEDY_ROW)

    def again(_: int) -> None:
        engine.step([chunk])

    with pytest.raises(InternalError, match="another was running"):
        engine.step([chunk], again)
    assert first_choices(engine.step([chunk])) != [None]


def test_lengths_beyond_the_model_are_refused() -> None:
    assert Engine(model_of("llama"), dtype="float32", device="cpu", block_size=4, num_blocks=4).max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len: 65 exceeds"):
        Engine(model_of("llama"), dtype="float32", device="cpu", block_size=4, num_blocks=4, max_model_len=65)
