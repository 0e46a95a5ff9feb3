"""Detokenizer, stop texts and their joint output, against one-shot decoding (failure class 18)."""

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pdserve.core.errors import ModelUnavailable
from pdserve.core.models import DEFAULT_MODEL, resolve_model_dir
from pdserve.core.work import SampledToken
from pdserve.router.detokenizer import Vocabulary
from pdserve.router.output import OutputText, Shown
from pdserve.router.stops import StopMatcher
from tests.router.models import byte_level_tokenizer, sentencepiece_tokenizer, vocabulary_of


@cache
def byte_level() -> tuple[Tokenizer, Vocabulary]:
    tokenizer = byte_level_tokenizer()
    return tokenizer, vocabulary_of(tokenizer)


@cache
def sentencepiece() -> tuple[Tokenizer, Vocabulary]:
    tokenizer = sentencepiece_tokenizer()
    return tokenizer, vocabulary_of(tokenizer)


@cache
def smollm2() -> tuple[Tokenizer, Vocabulary]:
    tokenizer = Tokenizer.from_file(str(resolve_model_dir(DEFAULT_MODEL) / "tokenizer.json"))
    return tokenizer, vocabulary_of(tokenizer)


def is_prepared() -> bool:
    try:
        resolve_model_dir(DEFAULT_MODEL)
    except ModelUnavailable:
        return False
    return True


MODELS = [
    byte_level,
    sentencepiece,
    pytest.param(smollm2, marks=[pytest.mark.smollm2, pytest.mark.skipif(not is_prepared(), reason="pdserve pull")]),
]


def one_shot(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("model", MODELS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_deltas_join_to_the_one_shot_text(
    model: Callable[[], tuple[Tokenizer, Vocabulary]], data: st.DataObject
) -> None:
    tokenizer, vocabulary = model()
    top = tokenizer.get_vocab_size(with_added_tokens=True) + 1
    few = st.integers(0, min(top, 300))
    ids = data.draw(st.lists(st.one_of(few, st.integers(0, top)), max_size=24))
    detokenizer = vocabulary.detokenizer()
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        whole = one_shot(tokenizer, ids[:count])
        assert whole.startswith(text) or "\ufffd" in whole
        assert one_shot(tokenizer, ids).startswith(text), "text that a later token changed was sent"
    assert text + detokenizer.finish() == one_shot(tokenizer, ids)


@pytest.mark.parametrize("text", ["naïve café 日本語", "😀👩‍👩‍👧", "مرحبا", " \n\t ", "a\u0301"])
def test_characters_are_never_cut(text: str) -> None:
    tokenizer, vocabulary = byte_level()
    detokenizer = vocabulary.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the first character at which the text ends with a stop; the longest such stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text("abc", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(letters, max_size=4))
@settings(max_examples=1000, deadline=None)
def test_stops_cut_where_the_definition_says(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, matched = "", None
    for piece in pieces:
        step = matcher.push(piece)
        shown += step.text
        matched = step.matched
        if matched is not None:
            break
        tail = matcher.held
        assert not tail or any(len(stop) > len(tail) and stop.startswith(tail) for stop in stops), "held for nothing"
    if matched is None:
        shown += matcher.flush()
    assert (shown, matched) == cut_at_first_stop("".join(pieces), stops)


def run(output: OutputText, ids: list[int]) -> tuple[list[Shown], str | None]:
    shown = []
    for index, token_id in enumerate(ids):
        step = output.push(SampledToken(index, token_id, -1.0))
        shown.append(step)
        if step.matched_stop is not None:
            return shown, step.matched_stop
    last = output.finish()
    shown.append(last)
    return shown, last.matched_stop


@pytest.mark.parametrize("model", [byte_level, sentencepiece])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_output_is_the_one_shot_text_cut_at_the_first_stop(
    model: Callable[[], tuple[Tokenizer, Vocabulary]], data: st.DataObject
) -> None:
    tokenizer, vocabulary = model()
    top = tokenizer.get_vocab_size(with_added_tokens=True) - 1
    ids = data.draw(st.lists(st.integers(0, top), max_size=16))
    whole = one_shot(tokenizer, ids)
    stops = data.draw(st.lists(st.sampled_from([*whole, *(whole[i : i + 2] for i in range(len(whole)))] or ["x"])))
    stops = [stop for stop in stops if stop][:4]
    shown, matched = run(OutputText(vocabulary.detokenizer(), stops), ids)
    text = "".join(step.text for step in shown)
    assert (text, matched) == cut_at_first_stop(whole, stops)
    tokens = [token.token_id for step in shown for token in step.tokens]
    assert tokens == ids[: len(tokens)], "tokens are shown in order, each once"
    if matched is None:
        assert tokens == ids


def test_tokens_of_a_stop_are_neither_shown_nor_counted() -> None:
    tokenizer, vocabulary = byte_level()
    ids = tokenizer.encode("the STOP the").ids
    output = OutputText(vocabulary.detokenizer(), ["STOP"])
    shown, matched = run(output, ids)
    assert matched == "STOP"
    assert "".join(step.text for step in shown) == "the "
    tokens = [token.token_id for step in shown for token in step.tokens]
    assert tokenizer.decode(tokens) == "the "
    assert output.num_shown_tokens == len(tokens)


def test_a_token_is_shown_at_once_without_stops_even_inside_a_character() -> None:
    tokenizer, vocabulary = byte_level()
    ids = tokenizer.encode("é" * 2).ids[:1]
    half = tokenizer.encode("\u20ac").ids
    output = OutputText(vocabulary.detokenizer(), [])
    for index, token_id in enumerate([*ids, *half]):
        assert [token.token_id for token in output.push(SampledToken(index, token_id, 0.0)).tokens] == [token_id]


def test_the_ending_token_is_counted_and_its_text_is_not_shown() -> None:
    tokenizer, vocabulary = byte_level()
    eos = tokenizer.token_to_id("<|im_end|>")
    letter = tokenizer.encode("b").ids[0]
    assert eos is not None
    output = OutputText(vocabulary.detokenizer(), ["bc"])
    assert not output.push(SampledToken(0, letter, 0.0)), "b may begin the stop"
    last = output.finish(SampledToken(1, eos, 0.0))
    assert (last.text, [token.token_id for token in last.tokens]) == ("b", [letter, eos])
    assert output.num_shown_tokens == 2
