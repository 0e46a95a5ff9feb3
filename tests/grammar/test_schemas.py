"""JSON Schema: what random choices under the mask make is valid by `jsonschema`, whatever is valid is let through, and what is
not served is refused by name."""

import json

import jsonschema
import pytest

from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar.compiling import compile_grammar
from pdserve.grammar.outcome import GrammarRefused
from pdserve.grammar.vocabulary import GrammarVocabulary
from tests.grammar.schemas import REFUSED, SERVED
from tests.grammar.walks import lets_through, matcher_of, random_answer

pytestmark = pytest.mark.smollm2

NUM_WALKS = 4
FORMATS = jsonschema.FormatChecker(("date", "ipv4", "ipv6", "uuid", "email"))
"""Formats that jsonschema knows without more packages."""


def judge(schema: dict[str, object]) -> "jsonschema.protocols.Validator":
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, format_checker=FORMATS)


@pytest.mark.parametrize("name", SERVED)
def test_random_answers_are_valid(name: str, vocabulary: GrammarVocabulary) -> None:
    schema, _ = SERVED[name]
    for seed in range(NUM_WALKS):
        matcher = matcher_of(GrammarKind.JSON_SCHEMA, json.dumps(schema), vocabulary)
        judge(schema).validate(json.loads(random_answer(matcher, vocabulary, seed)))


@pytest.mark.parametrize("name", SERVED)
def test_valid_answers_are_let_through(name: str, vocabulary: GrammarVocabulary) -> None:
    schema, instance = SERVED[name]
    judge(schema).validate(instance)
    plain = json.dumps(instance, ensure_ascii=False)
    indented = json.dumps(instance, ensure_ascii=False, indent=2)
    for text in (plain, indented, json.dumps(instance, ensure_ascii=False, separators=(",", ":"))):
        matcher = matcher_of(GrammarKind.JSON_SCHEMA, json.dumps(schema), vocabulary)
        assert lets_through(matcher, vocabulary, text), text


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(name: str, vocabulary: GrammarVocabulary) -> None:
    text, named = REFUSED[name]
    with pytest.raises(GrammarRefused) as caught:
        compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, text), vocabulary)
    reason = str(caught.value)
    assert named in reason
    assert "\n" not in reason
    assert len(reason) <= 300


def test_at_least_thirty_kinds_are_served() -> None:
    assert len(SERVED) >= 30
    assert len(REFUSED) >= 20


def test_white_space_ends(vocabulary: GrammarVocabulary) -> None:
    """A small model that loves line breaks would write them for ever between two brackets."""
    newline, brace = (vocabulary.tokenizer.tokenize_str(text)[0] for text in ("\n", "{"))
    matcher = matcher_of(GrammarKind.JSON_SCHEMA, '{"type": "object"}', vocabulary)
    matcher.accept(brace)
    for _ in range(32):
        matcher.accept(newline)
    assert not lets_through(matcher, vocabulary, "\n}")
