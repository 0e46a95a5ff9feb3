"""What an answer is told to be: from the client's structured output to a grammar, and the check at the door that it is served."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pdserve.core.clock import Clock
from pdserve.core.errors import GrammarNotServed, GrammarTooSlow, InvalidRequest, Overloaded
from pdserve.core.models import resolve_model_dir
from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar.checks import MAX_TEXT_BYTES
from pdserve.grammar.compiler import COMPILE_LIMIT_S, GrammarCompiler, Outcome
from pdserve.grammar.outcome import Cause, NotCompiled
from pdserve.grammar.vocabulary import GrammarVocabulary, load_vocabulary
from pdserve.router.chat.tool_grammar import tool_grammar
from pdserve.router.request import (
    ChoiceOutput,
    GenerateCall,
    GrammarOutput,
    JsonObjectOutput,
    JsonSchemaOutput,
    RegexOutput,
    StructuredOutput,
    ValidChat,
    ValidInput,
)
from pdserve.router.template import read_config

MAX_CHOICES = 1024
ANY_OBJECT = '{"type":"object"}'
TOOLS_FIELD = "chat.tools"
HINT = "docs/structured_output.md says what is served"


def checked_grammar(call: GenerateCall) -> Grammar | None:
    """Return the grammar that a call's answer must belong to, or None. Raises InvalidRequest, naming the field.

    Whether the grammar can be served is seen by `GrammarDoor`, which may take longer.
    """
    output = call.structured_output
    if output is None:
        return None
    _check_combination(call)
    field, grammar = field_of(output), grammar_of(output)
    size = len(grammar.text.encode(errors="replace"))
    if size > MAX_TEXT_BYTES:
        _refuse(field, f"{field} makes a grammar of {size} bytes", f"at most {MAX_TEXT_BYTES}")
    if not grammar.text.strip():
        _refuse(field, f"{field} is empty", "leave structured_output unset for a free answer")
    return grammar


def checked_tool_grammar(call: GenerateCall, given: ValidInput, tool_format: str | None) -> Grammar | None:
    """Return the grammar of an answer that must call a tool, or None. Raises InvalidRequest for what cannot go with it."""
    grammar = tool_grammar(given, tool_format) if isinstance(given, ValidChat) else None
    if grammar is None:
        return None
    if call.structured_output is not None:
        _refuse(
            "chat.tool_choice", "a call that must be made cannot have a structured output", "leave one of them unset"
        )
    _check_combination(call, "chat.tool_choice")
    size = len(grammar.text.encode(errors="replace"))
    if size > MAX_TEXT_BYTES:
        _refuse(
            TOOLS_FIELD, f"the tools make a grammar of {size} bytes", f"at most {MAX_TEXT_BYTES}, or tool_choice AUTO"
        )
    return grammar


def grammar_of(output: StructuredOutput) -> Grammar:
    """Return the grammar of a structured output. Raises InvalidRequest for choices that are none."""
    match output:
        case JsonSchemaOutput(schema):
            # JSON Schema knows two schemas that are no objects; the one that allows all is the empty object.
            return Grammar(GrammarKind.JSON_SCHEMA, "{}" if schema.strip() == "true" else schema)
        case JsonObjectOutput():
            return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
        case RegexOutput(pattern):
            return Grammar(GrammarKind.REGEX, pattern)
        case ChoiceOutput(texts):
            return Grammar(GrammarKind.LARK, _choice_grammar(texts))
        case GrammarOutput(text):
            return Grammar(GrammarKind.LARK, text)


def field_of(output: StructuredOutput) -> str:
    """Return the contract's name of the field that was set."""
    match output:
        case JsonSchemaOutput():
            return "structured_output.json_schema"
        case JsonObjectOutput():
            return "structured_output.json_object"
        case RegexOutput():
            return "structured_output.regex"
        case ChoiceOutput():
            return "structured_output.choice"
        case GrammarOutput():
            return "structured_output.grammar"


class GrammarDoor:
    """Sees at the door whether a grammar can be served, by compiling it as the nodes will."""

    def __init__(self, compiler: GrammarCompiler, clock: Clock, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._compiler, self._clock, self._limit_s = compiler, clock, limit_s

    async def check(self, call: GenerateCall, grammar: Grammar | None) -> None:
        """Return if `grammar`, that of `call`, can be served. Raises GrammarNotServed, GrammarTooSlow or Overloaded."""
        if grammar is None:
            return
        field = TOOLS_FIELD if call.structured_output is None else field_of(call.structured_output)
        outcome = await self._outcome(grammar)
        if not isinstance(outcome, NotCompiled):
            return
        match outcome.cause:
            case Cause.REFUSED:
                raise GrammarNotServed(f"{field} cannot be served: {outcome.reason}", hint=HINT, field=field)
            case Cause.LATE:
                raise GrammarTooSlow(f"{field} takes too long: {outcome.reason}", hint=HINT, field=field)
            case Cause.BUSY:
                raise Overloaded(outcome.reason, hint="try again", retry_after_s=1.0)

    def gauges(self) -> dict[str, float]:
        """Return the compiler's gauges."""
        return self._compiler.gauges()

    def close(self) -> None:
        """End the compiler's thread."""
        self._compiler.close()

    async def _outcome(self, grammar: Grammar) -> Outcome:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Outcome] = loop.create_future()

        def settle(outcome: Outcome) -> None:
            if not told.done():
                told.set_result(outcome)

        self._compiler.request(grammar, _on_loop(loop, settle))
        try:
            async with asyncio.timeout(self._limit_s):
                return await told
        except TimeoutError:
            return self._compiler.overdue(grammar, self._limit_s, self._clock.now_s())
        finally:
            self._compiler.expire(self._clock.now_s())


def grammar_door(model: str, vocab_size: int, clock: Clock) -> GrammarDoor:
    """Return the door of a model, by alias or folder, with as many ids as its embedding has; it reads no file yet."""

    def load() -> GrammarVocabulary:
        folder = resolve_model_dir(model)
        return load_vocabulary(folder, vocab_size, end_token_ids(folder))

    return GrammarDoor(GrammarCompiler(load, clock), clock)


def end_token_ids(folder: Path) -> frozenset[int]:
    """Return the end-of-sequence ids that a model's folder states, as the nodes read them; empty if none."""
    for name in ("generation_config.json", "config.json"):
        stated = read_config(folder / name).get("eos_token_id")
        if isinstance(stated, int):
            return frozenset({stated})
        if isinstance(stated, list):
            return frozenset(token_id for token_id in stated if isinstance(token_id, int))
    return frozenset()


def _on_loop(loop: asyncio.AbstractEventLoop, settle: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
    """Return `settle` for any thread; what is known at once is settled at once."""
    owner = threading.get_ident()

    def done(outcome: Outcome) -> None:
        if threading.get_ident() == owner:
            settle(outcome)
        else:
            loop.call_soon_threadsafe(settle, outcome)

    return done


def _choice_grammar(texts: tuple[str, ...]) -> str:
    """Return a Lark grammar of these texts. A JSON string is a Lark string; no text in it may look like a directive."""
    field = "structured_output.choice"
    if not 1 <= len(texts) <= MAX_CHOICES:
        _refuse(f"{field}.texts", f"there are {len(texts)} choices", f"1 to {MAX_CHOICES}")
    for index, text in enumerate(texts):
        if not text:
            _refuse(f"{field}.texts[{index}]", "the choice is empty", "give at least one character")
    quoted = (json.dumps(text, ensure_ascii=False).replace("%", "\\u0025") for text in texts)
    return "start: CHOICE\nCHOICE: " + " | ".join(quoted)


def _check_combination(call: GenerateCall, asked: str = "structured_output") -> None:
    """Refuse what would fight the grammar over which tokens may come, or when the answer may end."""
    fights = (
        ("stop.min_tokens", bool(call.min_tokens), "the grammar says when the answer may end"),
        ("stop.ignore_eos", bool(call.ignore_eos), "the answer ends when the grammar is complete"),
        ("sampling.allowed_token_ids", bool(call.allowed_token_ids), "the grammar says which tokens may come"),
        ("sampling.banned_token_ids", bool(call.banned_token_ids), "without them an answer may become impossible"),
        ("sampling.banned_words", bool(call.banned_words), "without them an answer may become impossible"),
    )
    for name, is_used, why in fights:
        if is_used:
            _refuse(name, f"{name} cannot be combined with {asked}: {why}", "leave one of them unset")


def _refuse(field: str, message: str, hint: str) -> NoReturn:
    raise InvalidRequest(message, hint=hint, field=field)
