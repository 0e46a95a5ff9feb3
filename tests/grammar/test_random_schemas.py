"""Schemas that nobody would write: each is refused, or its random answers are valid; the library never falls.

A regression that this found: a number beyond 64 bits was taken, and answered with the nearest that the library can hold.
"""

import json
import random

import jsonschema
import pytest

from pdserve.core.work import Grammar, GrammarKind
from pdserve.engine.grammar import GrammarMatcher
from pdserve.grammar.compiling import compile_grammar
from pdserve.grammar.outcome import GrammarRefused
from pdserve.grammar.vocabulary import GrammarVocabulary
from tests.grammar.walks import NoEnd, random_answer

pytestmark = pytest.mark.smollm2

Schema = dict[str, object] | bool

NUM_SCHEMAS = 600
NUMBERS = (0, 1, -1, 3, 10, 0.5, -2.25, 255, 100000)
PATTERNS = ("^[a-c]+$", "a|b", "x{2,5}", "[0-9]{1,3}", "^$", "é?z", ".")
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object", ["string", "null"], ["integer", "object"])
VALUES: tuple[object, ...] = (1, "a", None, [], {}, 1.5, "\n", True, {"a": [1]}, "é")
LEAVES: tuple[Schema, ...] = (True, {}, {"type": "integer"}, {"const": None}, {"$ref": "#/$defs/a"}, {"type": "string"})
SUBSCHEMA = ("items", "additionalProperties")
LISTS = ("prefixItems", "anyOf", "allOf", "oneOf")
BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OTHERS = ("type", "type", "enum", "const", "pattern", "properties", "required", "patternProperties", "$ref", "$defs")


def schema_of(rng: random.Random, depth: int) -> Schema:
    if depth <= 0:
        return rng.choice(LEAVES)
    keywords = rng.choices((*SUBSCHEMA, *LISTS, *BOUNDS, *RANGES, *OTHERS), k=rng.randint(1, 4))
    return {keyword: value_of(rng, keyword, depth - 1 - rng.randint(0, 1)) for keyword in keywords}


def value_of(rng: random.Random, keyword: str, depth: int) -> object:
    if keyword in SUBSCHEMA:
        return schema_of(rng, depth)
    if keyword in LISTS:
        return [schema_of(rng, depth) for _ in range(rng.randint(1, 3))]
    if keyword in RANGES:
        return rng.choice(NUMBERS)
    if keyword in BOUNDS:
        return rng.randint(0, 4)
    match keyword:
        case "type":
            return rng.choice(TYPES)
        case "enum":
            return rng.sample(VALUES, rng.randint(1, 4))
        case "const":
            return rng.choice(VALUES)
        case "pattern":
            return rng.choice(PATTERNS)
        case "required":
            return rng.sample("abcz", rng.randint(0, 3))
        case "$ref":
            return rng.choice(("#", "#/$defs/a", "#/$defs/b", "#/nowhere"))
        case "$defs":
            return {"a": schema_of(rng, depth), "b": schema_of(rng, depth)}
        case "patternProperties":
            return {rng.choice(PATTERNS): schema_of(rng, depth)}
        case _:
            return {name: schema_of(rng, depth) for name in rng.sample("abcé", rng.randint(0, 3))}


def test_random_schemas_are_refused_or_kept_to(vocabulary: GrammarVocabulary) -> None:
    num_kept = num_refused = 0
    for seed in range(NUM_SCHEMAS):
        rng = random.Random(seed)
        schema = schema_of(rng, rng.randint(1, 3))
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
            matcher = GrammarMatcher(compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), vocabulary))
        except GrammarRefused:
            num_refused += 1
            continue
        except jsonschema.SchemaError:
            continue
        try:
            answer = random_answer(matcher, vocabulary, seed)
        except NoEnd:
            continue
        num_kept += 1
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
    assert num_kept > NUM_SCHEMAS // 6
    assert num_refused > NUM_SCHEMAS // 20
