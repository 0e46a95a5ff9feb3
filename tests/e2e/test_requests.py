"""Requests through real processes: sampling, logprobs, answers, stops, boundaries (failure classes 10, 11, 12, 19, 30)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from pdserve.client import Answer, Chat, Options, Turn
from pdserve.client.answer import Delta
from pdserve.client.request import Prompt
from pdserve.core.errors import InvalidRequest
from pdserve.core.work import FinishReason
from tests.e2e.cluster import Cluster, start_cluster
from tests.e2e.request_oracle import Asked, generated, log_probabilities
from tests.e2e.tiny_model import EOS_ID, decided_prompts, expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

POOL_TOKENS = 16 * 56


@pytest_asyncio.fixture(scope="module")
async def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with start_cluster(
        tiny,
        tmp_path_factory.mktemp("requests"),
        prefill=(("--block-size", "16", "--kv-blocks", "64", "--token-budget", "48"),),
        decode=(("--block-size", "32", "--kv-blocks", "28"),),
    ) as running:
        yield running


@pytest_asyncio.fixture(autouse=True)
async def oracle(cluster: Cluster) -> AsyncIterator[None]:
    yield
    await cluster.leak_oracle()


def reasons(answer: Answer) -> list[FinishReason]:
    return [choice.finished.reason for choice in answer.choices if choice.finished is not None]


def completion_tokens(answer: Answer) -> int:
    assert answer.summary is not None
    return answer.summary.usage.completion_tokens


# ---- sampling


BIASES = {200: 4.0, 17: -100.0, 90: 2.5}
ASKED = {
    "repetition": (Options(repetition_penalty=1.6), Asked(repetition_penalty=1.6)),
    "presence": (Options(presence_penalty=2.0), Asked(presence_penalty=2.0)),
    "frequency": (Options(frequency_penalty=1.5), Asked(frequency_penalty=1.5)),
    "bias": (Options(logit_bias=BIASES), Asked(logit_bias=BIASES)),
    "allowed": (Options(allowed_token_ids=tuple(range(60, 90))), Asked(allowed=tuple(range(60, 90)))),
    "min_tokens": (Options(logit_bias={EOS_ID: 90.0}, min_tokens=9), Asked(logit_bias={EOS_ID: 90.0}, min_tokens=9)),
    "together": (
        Options(
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=-0.5,
            logit_bias=BIASES,
            allowed_token_ids=tuple(range(3, 240)),
            banned_token_ids=(50, 51, 52),
        ),
        Asked(1.3, BIASES, (), 0, tuple(range(3, 240)), (50, 51, 52), -0.5, 0.7),
    ),
}


@pytest.mark.parametrize("name", ASKED)
async def test_what_changes_logits_gives_the_tokens_of_transformers(cluster: Cluster, tiny: Path, name: str) -> None:
    options, asked = ASKED[name]
    [prompt] = decided_prompts(tiny, 1, 40, 24)
    expected = generated(tiny, prompt, 24, asked)
    answer = await cluster.answer(tuple(prompt), replace(options, max_tokens=24))
    assert answer.token_ids == expected
    assert expected != expected_tokens(tiny, prompt, 24)[0], "the parameter must matter"
    if name == "min_tokens":
        assert (len(expected), reasons(answer)) == (10, [FinishReason.STOP]), "the end comes right after min_tokens"


async def test_banned_ids_and_words_never_appear(cluster: Cluster, tiny: Path) -> None:
    """The answer's own tokens are banned, as ids and as a word of two letters."""
    [prompt] = decided_prompts(tiny, 1, 30, 24)
    tokens, _ = expected_tokens(tiny, prompt, 24)
    by_id = await cluster.answer(tuple(prompt), Options(max_tokens=24, banned_token_ids=(tokens[0], tokens[5])))
    assert by_id.token_ids == generated(tiny, prompt, 24, Asked(banned=(tokens[0], tokens[5])))
    letters = await cluster.answer(tuple(prompt), Options(max_tokens=24, allowed_token_ids=LETTERS))
    word = letters.text[3:5]
    ids, space = tuple(prompt_ids(word)), prompt_ids(" ")[0]
    expected = generated(tiny, prompt, 24, Asked(allowed=LETTERS, banned_words=(ids, (space, *ids))))
    by_word = await cluster.answer(
        tuple(prompt), Options(max_tokens=24, allowed_token_ids=LETTERS, banned_words=(word,))
    )
    assert by_word.token_ids == expected
    assert word not in by_word.text


LETTERS = tuple(prompt_ids("abcdefghijklmnopqrstuvwxyz"))


async def test_seeds_repeat_and_sequences_differ(cluster: Cluster) -> None:
    """Failure class 19: the noise of sequence i is of (seed, i), whatever runs beside it."""
    options = Options(n=4, max_tokens=16, temperature=1.3, seed=11, ignore_eos=True)
    noise = [cluster.answer(f"noise {i}", Options(max_tokens=24, temperature=1.0)) for i in range(3)]
    first, *_ = await asyncio.gather(cluster.answer("seeds", options), *noise)
    again = await cluster.answer("seeds", options)
    alone = await cluster.answer("seeds", replace(options, n=1))
    ids = [choice.token_ids for choice in first.choices]
    assert [choice.token_ids for choice in again.choices] == ids
    assert alone.token_ids == ids[0]
    assert len({tuple(each) for each in ids}) == 4
    other = await cluster.answer("seeds", replace(options, seed=12))
    assert other.token_ids != ids[0]


# ---- logprobs


async def test_logprobs_are_those_of_transformers_on_both_sides_of_the_hand_over(cluster: Cluster, tiny: Path) -> None:
    prompt = [3 + (11 * i) % 250 for i in range(53)]
    answer = await cluster.answer(tuple(prompt), Options(max_tokens=8, top_logprobs=5, prompt_logprobs=True))
    scores = log_probabilities(tiny, [*prompt, *answer.token_ids])
    assert [token.token_id for token in answer.prompt] == prompt
    assert (answer.prompt[0].logprob, answer.prompt[0].top_logprobs) == (None, ())
    [choice] = answer.choices
    logprobs = [*(token.logprob for token in answer.prompt[1:]), *choice.logprobs]
    tops = [*(token.top_logprobs for token in answer.prompt[1:]), *choice.top_logprobs]
    ids = [*prompt, *answer.token_ids][1:]
    assert len(logprobs) == len(tops) == len(ids)
    for row, token_id, logprob, top in zip(scores, ids, logprobs, tops, strict=False):
        assert logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        best = row.topk(5)
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert all(value == pytest.approx(float(row[token]), abs=1e-3) for token, value in top)


async def test_logprobs_tell_of_the_model_and_not_of_the_parameters(cluster: Cluster, tiny: Path) -> None:
    prompt = prompt_ids("unmodified")
    options = Options(max_tokens=6, temperature=1.5, seed=3, repetition_penalty=1.5, logit_bias={9: 3.0}, top_k=30)
    answer = await cluster.answer(tuple(prompt), options)
    scores = log_probabilities(tiny, [*prompt, *answer.token_ids])[len(prompt) - 1 :]
    expected = [float(row[token]) for row, token in zip(scores, answer.token_ids, strict=False)]
    assert answer.choices[0].logprobs == pytest.approx(expected, abs=1e-3)


async def test_prompt_scores_of_a_single_token_prompt_and_without_alternatives(cluster: Cluster) -> None:
    one = await cluster.answer((7,), Options(max_tokens=2, prompt_logprobs=True))
    assert [(token.token_id, token.logprob) for token in one.prompt] == [(7, None)]
    plain = await cluster.client.complete((7, 8, 9), Options(max_tokens=1, prompt_logprobs=True))
    assert [token.logprob is not None for token in plain.prompt] == [False, True, True]
    assert not any(token.top_logprobs for token in plain.prompt)


# ---- several answers


async def test_four_answers_end_each_on_its_own(cluster: Cluster) -> None:
    """Failure class 11: by stop id, by stop text, by length; one prefill, and usage over all of them."""
    options = Options(n=4, max_tokens=24, temperature=1.2, seed=5, ignore_eos=True, allowed_token_ids=LETTERS)
    whole = await cluster.answer("four answers", options)
    stop_id, stop = whole.choices[1].token_ids[4], whole.choices[2].text[7:10]
    before = await cluster.gauge("prefill0", "forwards")
    answer = await cluster.answer("four answers", replace(options, stop_token_ids=(stop_id,), stop=(stop,)))
    assert await cluster.gauge("prefill0", "forwards") == before + 1
    for full, choice in zip(whole.choices, answer.choices, strict=True):
        assert choice.finished is not None
        by_id = full.token_ids.index(stop_id) if stop_id in full.token_ids else 99
        by_text = full.text.index(stop) + len(stop) - 1 if stop in full.text else 99
        if min(by_id, by_text) == 99:
            assert (choice.text, choice.finished.reason) == (full.text, FinishReason.LENGTH)
        elif by_text < by_id:
            assert (choice.text, choice.finished.stop) == (full.text[: by_text + 1 - len(stop)], stop)
            assert choice.token_ids == full.token_ids[: by_text + 1 - len(stop)]
        else:
            assert (choice.text, choice.finished.stop_token_id) == (full.text[:by_id], stop_id)
            assert choice.token_ids == full.token_ids[: by_id + 1]
    assert {FinishReason.STOP, FinishReason.STOP_SEQUENCE} <= set(reasons(answer))
    assert completion_tokens(answer) == sum(len(choice.token_ids) for choice in answer.choices)


@pytest.mark.parametrize("num_parts", [0, 1, 5])
async def test_a_client_that_leaves_four_answers_leaves_nothing(cluster: Cluster, num_parts: int) -> None:
    """The oracle of every test looks at what is left; the neighbour is not touched."""
    neighbour = asyncio.create_task(cluster.answer("neighbour", Options(max_tokens=48)))
    options = Options(n=4, max_tokens=200, temperature=1.0, ignore_eos=True)
    parts = cluster.client.generate("left alone", options)
    async with contextlib.aclosing(parts):
        for _ in range(num_parts):
            assert isinstance(await anext(parts), Delta)
    assert len((await neighbour).token_ids) == 48


def mixed(rng: Random) -> Options:
    """Draw a request of few tokens with much of what may be asked."""
    return Options(
        n=rng.choice([1, 1, 2, 3]),
        max_tokens=rng.randint(1, 20),
        temperature=rng.choice([0.0, 1.0, 1.4]),
        seed=rng.randrange(1000),
        top_k=rng.choice([None, 5]),
        repetition_penalty=rng.choice([None, 1.4]),
        frequency_penalty=rng.choice([None, 0.8]),
        allowed_token_ids=(*LETTERS, EOS_ID),
        logit_bias={EOS_ID: rng.choice([-50.0, 5.0])},
        stop=tuple(rng.sample("aeiouxyz", rng.randint(0, 3))),
        include_stop=rng.random() < 0.5,
        min_tokens=rng.choice([None, 1]),
        top_logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.random() < 0.2,
    )


def content(answer: Answer) -> list[tuple[str, list[int], object]]:
    return [(choice.text, choice.token_ids, choice.finished) for choice in answer.choices]


async def test_mixed_requests_at_once_are_what_they_are_alone(cluster: Cluster) -> None:
    """Some of them are left in the middle: their neighbours in the same batches and blocks notice nothing."""
    rng = Random(5)
    requests = [(tuple(prompt_ids("mixed " * rng.randint(1, 12) + str(i))), mixed(rng)) for i in range(24)]
    alone = [content(await cluster.answer(prompt, options)) for prompt, options in requests]

    async def leave(prompt: tuple[int, ...], options: Options, num_parts: int) -> None:
        async with contextlib.aclosing(cluster.client.generate(prompt, options)) as parts:
            for _ in range(num_parts):
                await anext(parts)

    left = [
        leave(prompt, replace(options, max_tokens=60, n=3), index % 4)
        for index, (prompt, options) in enumerate(requests)
    ]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(cluster.answer(prompt, options) for prompt, options in requests)), asyncio.gather(*left)
    )
    assert [content(answer) for answer in answers] == alone
    ends = {choice.finished.reason for answer in answers for choice in answer.choices if choice.finished}
    assert ends == set(FinishReason), "the requests must end in every way"


async def test_answers_too_many_for_the_pool_are_refused_and_those_that_fit_are_served(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await cluster.answer((5,) * 200, Options(n=64, max_tokens=100))
    assert refused.value.field == "n"
    answer = await cluster.answer((5,) * 40, Options(n=20, max_tokens=8, temperature=1.0, ignore_eos=True))
    assert (len(answer.choices), completion_tokens(answer)) == (20, 160)


async def test_n_with_one_token_each_never_reaches_decode(cluster: Cluster) -> None:
    steps = await cluster.gauge("decode0", "steps")
    answer = await cluster.answer("once", Options(n=3, max_tokens=1, temperature=1.0, seed=1))
    assert reasons(answer) == [FinishReason.LENGTH] * 3
    assert completion_tokens(answer) == 3
    assert await cluster.gauge("decode0", "steps") == steps


async def test_one_label_at_once_and_right_after(cluster: Cluster) -> None:
    """Failure class 12."""
    options = Options(n=2, max_tokens=8, request_id="same", temperature=1.0, seed=4)
    answers = await asyncio.gather(*(cluster.answer("label", options) for _ in range(4)))
    answers.append(await cluster.answer("label", options))
    ids = [[choice.token_ids for choice in answer.choices] for answer in answers]
    assert all(each == ids[0] for each in ids)


# ---- ends


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["eos", "stop id", "stop text", "length"])
async def test_an_answer_that_ends_at_its_first_token(cluster: Cluster, tiny: Path, how: str, n: int) -> None:
    """Failure class 10. What the nodes see themselves never gets a step of the decode node."""
    [prompt] = decided_prompts(tiny, 1, 20, 24)
    [first], _ = expected_tokens(tiny, prompt, 1)
    letter = await cluster.answer(tuple(prompt), Options(max_tokens=1, allowed_token_ids=LETTERS))
    options, reason = {
        "eos": (Options(max_tokens=8, logit_bias={EOS_ID: 100.0}), FinishReason.STOP),
        "stop id": (Options(max_tokens=8, stop_token_ids=(first,)), FinishReason.STOP),
        "stop text": (
            Options(max_tokens=8, stop=(letter.text,), allowed_token_ids=LETTERS),
            FinishReason.STOP_SEQUENCE,
        ),
        "length": (Options(max_tokens=1), FinishReason.LENGTH),
    }[how]
    steps = await cluster.gauge("decode0", "steps")
    answer = await cluster.answer(tuple(prompt), replace(options, n=n))
    assert reasons(answer) == [reason] * n
    assert completion_tokens(answer) == (0 if how == "stop text" else n)
    if how != "stop text":
        assert await cluster.gauge("decode0", "steps") == steps
    await cluster.leak_oracle()
    assert (await cluster.answer(tuple(prompt), replace(options, n=n, include_stop=True))).choices[0].text == (
        letter.text if how == "stop text" else answer.choices[0].text if how != "stop id" else stop_text(first)
    )


def stop_text(token_id: int) -> str:
    """Return the text of a single token, as an answer shows it."""
    from tests.e2e.tiny_model import _byte_tokenizer

    return str(_byte_tokenizer().decode([token_id]))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", [0, 1])
async def test_a_stop_text_may_span_the_hand_over(cluster: Cluster, include: bool, start: int) -> None:
    options = Options(max_tokens=16, allowed_token_ids=LETTERS, repetition_penalty=1.5)
    whole = await cluster.answer("stops", options)
    stop = whole.text[start : start + 3]
    answer = await cluster.answer("stops", replace(options, stop=("zzz", stop), include_stop=include))
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.stop) == (FinishReason.STOP_SEQUENCE, stop)
    cut = whole.text.index(stop) + (len(stop) if include else 0)
    assert (answer.text, answer.token_ids) == (whole.text[:cut], whole.token_ids[:cut])
    assert completion_tokens(answer) == cut


async def test_no_end_before_min_tokens(cluster: Cluster) -> None:
    """Ends of all three kinds: one is waiting at every token."""
    options = Options(max_tokens=16, allowed_token_ids=LETTERS, repetition_penalty=1.5)
    whole = await cluster.answer("least", options)
    at_text = await cluster.answer("least", replace(options, stop=tuple(sorted(set(whole.text))), min_tokens=5))
    assert at_text.text == whole.text[:5], "the sixth token is the first that may complete a stop"
    assert reasons(at_text) == [FinishReason.STOP_SEQUENCE]
    ids = (whole.token_ids[0], EOS_ID)
    both = replace(options, stop_token_ids=ids, allowed_token_ids=(*LETTERS, EOS_ID), logit_bias={EOS_ID: 100.0})
    at_id = await cluster.answer("least", replace(both, min_tokens=5))
    assert (len(at_id.token_ids), at_id.token_ids[-1]) == (6, EOS_ID)
    assert not set(at_id.token_ids[:5]) & set(ids)
    with pytest.raises(InvalidRequest) as refused:
        await cluster.answer("least", Options(allowed_token_ids=(EOS_ID,), min_tokens=1))
    assert refused.value.field == "stop.min_tokens"


# ---- boundaries


BOUNDARIES: list[tuple[str, Prompt, int | None]] = [
    ("one token", (5,), 1),
    ("one special token", (1,), 1),
    ("special tokens alone", "<|im_end|><|im_start|>", 2),
    ("end-of-sequence alone", "<|endoftext|>", 1),
    ("one space", " ", 1),
    ("line breaks", "\n\n\n", 3),
    ("a null", "\x00", 1),
    ("control characters", "\x1b[31m\x7f", 6),
    ("an emoji of many code points", "👩‍👩‍👧", 18),
    ("combining marks", "a\u0301\u0327", 5),
    ("right to left", "\u202eabc", 6),
    ("not a character", "\ufffd\uffff", 6),
    ("a chat of one empty turn", Chat((Turn("user", ""),)), None),
    ("one below the limit", (5,) * (POOL_TOKENS - 1), POOL_TOKENS - 1),
]


@pytest.mark.parametrize(("prompt", "length"), [row[1:] for row in BOUNDARIES], ids=[row[0] for row in BOUNDARIES])
async def test_boundary_prompts_are_answered(cluster: Cluster, prompt: Prompt, length: int | None) -> None:
    """Failure class 30."""
    answer = await cluster.answer(prompt, Options(max_tokens=1))
    assert (reasons(answer), completion_tokens(answer)) == ([FinishReason.LENGTH], 1)
    assert answer.summary is not None
    if length is not None:
        assert answer.summary.usage.prompt_tokens == length


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "text"),
        ((), "token_ids"),
        (Chat(()), "chat"),
        ((5,) * POOL_TOKENS, "token_ids"),
        ((259,), "token_ids"),
        ("x" * POOL_TOKENS, "text"),
    ],
    ids=["no text", "no ids", "no turns", "ids at the limit", "no such id", "text at the limit"],
)
async def test_boundary_prompts_are_refused_by_name(cluster: Cluster, prompt: Prompt, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await cluster.answer(prompt, Options(max_tokens=1))
    assert refused.value.field.startswith(field)
    assert refused.value.hint


async def test_a_prompt_up_to_the_limit_gets_what_is_left(cluster: Cluster) -> None:
    answer = await cluster.answer((5,) * (POOL_TOKENS - 3), Options(ignore_eos=True))
    assert completion_tokens(answer) == 3
