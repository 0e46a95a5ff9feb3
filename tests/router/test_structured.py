"""From the client's structured output to a grammar, and the door that sees whether it can be served."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.core.clock import ManualClock
from pdserve.core.errors import GrammarNotServed, GrammarTooSlow, InvalidRequest, Overloaded, PdserveError
from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar.compiler import MAX_ORDERS, GrammarCompiler
from pdserve.grammar.outcome import GrammarRefused
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.router.request import (
    ChoiceOutput,
    GenerateCall,
    GrammarOutput,
    JsonObjectOutput,
    JsonSchemaOutput,
    RegexOutput,
    StructuredOutput,
)
from pdserve.router.structured import GrammarDoor, checked_grammar, end_token_ids, field_of, grammar_of

WAIT_S = 30.0
CALL = GenerateCall(structured_output=RegexOutput("a+"))


@pytest.mark.parametrize(
    ("output", "grammar", "field"),
    [
        (JsonSchemaOutput('{"type":"null"}'), Grammar(GrammarKind.JSON_SCHEMA, '{"type":"null"}'), "json_schema"),
        (JsonSchemaOutput(" true"), Grammar(GrammarKind.JSON_SCHEMA, "{}"), "json_schema"),
        (JsonObjectOutput(), Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'), "json_object"),
        (RegexOutput("a|b"), Grammar(GrammarKind.REGEX, "a|b"), "regex"),
        (GrammarOutput('start: "a"'), Grammar(GrammarKind.LARK, 'start: "a"'), "grammar"),
        (
            ChoiceOutput(("a", 'b"\\\n', "%json é")),
            Grammar(GrammarKind.LARK, 'start: CHOICE\nCHOICE: "a" | "b\\"\\\\\\n" | "\\u0025json é"'),
            "choice",
        ),
    ],
)
def test_each_output_is_a_grammar_and_has_a_field(output: StructuredOutput, grammar: Grammar, field: str) -> None:
    assert grammar_of(output) == grammar
    assert field_of(output) == f"structured_output.{field}"
    assert checked_grammar(GenerateCall(structured_output=output)) == grammar


def test_a_free_answer_has_no_grammar() -> None:
    assert checked_grammar(GenerateCall(min_tokens=5, ignore_eos=True)) is None


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (replace(CALL, min_tokens=1), "stop.min_tokens"),
        (replace(CALL, ignore_eos=True), "stop.ignore_eos"),
        (replace(CALL, allowed_token_ids=(1,)), "sampling.allowed_token_ids"),
        (replace(CALL, banned_token_ids=(1,)), "sampling.banned_token_ids"),
        (replace(CALL, banned_words=("a",)), "sampling.banned_words"),
        (GenerateCall(structured_output=RegexOutput("  ")), "structured_output.regex"),
        (GenerateCall(structured_output=RegexOutput("x" * 131073)), "structured_output.regex"),
        (GenerateCall(structured_output=ChoiceOutput(())), "structured_output.choice.texts"),
        (GenerateCall(structured_output=ChoiceOutput(("a",) * 1025)), "structured_output.choice.texts"),
        (GenerateCall(structured_output=ChoiceOutput(("a", ""))), "structured_output.choice.texts[1]"),
        (GenerateCall(structured_output=ChoiceOutput(("é" * 70000,))), "structured_output.choice"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(call: GenerateCall, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_grammar(call)
    assert caught.value.field == field
    assert caught.value.hint


@pytest.mark.parametrize("call", [replace(CALL, min_tokens=0), replace(CALL, ignore_eos=False)])
def test_what_changes_nothing_may_stand_beside(call: GenerateCall) -> None:
    assert checked_grammar(call) is not None


def door(load: Callable[[], GrammarVocabulary], limit_s: float = WAIT_S) -> tuple[GrammarDoor, GrammarCompiler]:
    clock = ManualClock()
    compiler = GrammarCompiler(load, clock)
    return GrammarDoor(compiler, clock, limit_s), compiler


async def refusal(target: GrammarDoor, call: GenerateCall = CALL) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        await target.check(call, checked_grammar(call))
    return caught.value


def no_vocabulary() -> GrammarVocabulary:
    raise GrammarRefused("this model cannot")


@pytest.mark.asyncio
async def test_the_door_names_the_field_and_the_reason() -> None:
    target, _ = door(no_vocabulary)
    error = await refusal(target)
    assert isinstance(error, GrammarNotServed)
    assert error.field == "structured_output.regex"
    assert "this model cannot" in error.message
    target.close()


@pytest.mark.asyncio
async def test_a_free_answer_passes_the_door_without_a_thread() -> None:
    target, compiler = door(no_vocabulary)
    await target.check(GenerateCall(), None)
    assert compiler.num_compiled == 0


@pytest.mark.asyncio
async def test_the_door_does_not_wait_for_ever_and_is_not_full_for_ever() -> None:
    may_load = threading.Event()

    def load() -> GrammarVocabulary:
        assert may_load.wait(WAIT_S)
        raise GrammarRefused("at last")

    target, compiler = door(load, limit_s=0.0)
    assert isinstance(await refusal(target), GrammarTooSlow)
    for number in range(MAX_ORDERS - 1):
        call = GenerateCall(structured_output=RegexOutput(f"{number}"))
        assert isinstance(await refusal(target, call), Overloaded), "the time went into the first one"
    full = await refusal(target, GenerateCall(structured_output=RegexOutput("one more")))
    assert isinstance(full, Overloaded)
    assert full.retry_after_s
    may_load.set()
    patient = GrammarDoor(compiler, ManualClock(), WAIT_S)
    assert isinstance(await refusal(patient), GrammarNotServed)
    target.close()


@pytest.mark.asyncio
async def test_a_client_that_leaves_leaves_the_door_whole() -> None:
    may_load = threading.Event()

    def load() -> GrammarVocabulary:
        assert may_load.wait(WAIT_S)
        raise GrammarRefused("at last")

    target, compiler = door(load)
    waiting = asyncio.create_task(target.check(CALL, checked_grammar(CALL)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    may_load.set()
    assert isinstance(await refusal(target), GrammarNotServed)
    assert compiler.gauges()["grammars.waiting"] == 0
    target.close()


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, set()),
        ({"config.json": '{"eos_token_id": 2}'}, {2}),
        ({"config.json": '{"eos_token_id": 2}', "generation_config.json": '{"eos_token_id": [3, 4]}'}, {3, 4}),
        ({"config.json": '{"eos_token_id": 2}', "generation_config.json": "{}"}, {2}),
    ],
)
def test_end_tokens_are_those_that_the_nodes_read(tmp_path: Path, files: dict[str, str], ids: set[int]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert end_token_ids(tmp_path) == ids
