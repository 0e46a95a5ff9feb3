"""What is refused before the library sees it: what it would take and then choke on, or take and read otherwise than it stands."""

import json
from decimal import Decimal, InvalidOperation

from llguidance.gbnf_to_lark import is_lark_syntax

from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar.outcome import GrammarRefused

MAX_TEXT_BYTES = 128 * 1024
"""Also keeps recursion in the library's native code, as deep as a chain of rules is long, within `compiler`'s stack."""
MAX_MULTIPLE = 10_000
"""Largest multipleOf, its point taken out: the library makes a state per remainder (measured: a million, 5 s and 270 MB)."""

LARGEST_NUMBER = 2**63 - 1
"""The library takes the nearest it can hold for a larger number, and answers with that."""
MAX_GBNF_CHARS = 32 * 1024
"""Turning GBNF into Lark takes a time that grows with the square of its rules (measured: 5000 rules, 6 s)."""


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in llama.cpp's notation rather than in Lark's."""
    return "::=" in text and not is_lark_syntax(text)


def check(grammar: Grammar) -> None:
    """Raise GrammarRefused for a text that must not reach the library."""
    if len(grammar.text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise GrammarRefused(f"it is longer than {MAX_TEXT_BYTES} bytes")
    if not grammar.text.strip():
        raise GrammarRefused("it is empty")
    if grammar.text.encode(errors="replace") != grammar.text.encode(errors="surrogatepass"):
        raise GrammarRefused("it is not valid Unicode")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            check_schema(grammar.text)
        case GrammarKind.LARK:
            if "%json" in grammar.text:
                raise GrammarRefused("%json is not served inside a grammar; send a JSON schema instead")
            if is_gbnf(grammar.text) and len(grammar.text) > MAX_GBNF_CHARS:
                raise GrammarRefused(f"GBNF is served up to {MAX_GBNF_CHARS} characters; Lark is quicker to read")
        case GrammarKind.REGEX:
            pass


def check_schema(text: str) -> None:
    """Raise GrammarRefused for a text that is no JSON Schema, or one with a keyword that must not reach the library."""
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, InvalidOperation) as error:
        raise GrammarRefused(f"it is not JSON: {error}") from None
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None
    if not isinstance(schema, dict):
        raise GrammarRefused("a schema is a JSON object")
    if "x-guidance" in schema:
        raise GrammarRefused("x-guidance is not served: options of the grammar library are pdserve's own")
    unseen: list[object] = [schema]
    while unseen:
        value = unseen.pop()
        if isinstance(value, int | Decimal) and not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
            raise GrammarRefused("a number has more than 64 bits")
        if isinstance(value, list):
            unseen += value
        elif isinstance(value, dict):
            unseen += value.values()
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | Decimal) and _coefficient(multiple) > MAX_MULTIPLE:
                raise GrammarRefused(
                    f"multipleOf {multiple} has too many remainders; its digits may be at most {MAX_MULTIPLE}"
                )


def _coefficient(number: int | Decimal) -> int:
    """Return a number's digits without sign, point and trailing zeros behind the point."""
    sign_free = abs(Decimal(number))
    if sign_free > MAX_MULTIPLE:
        return int(min(sign_free, Decimal(MAX_MULTIPLE + 1)))
    digits = sign_free.normalize().as_tuple()
    coefficient = int("".join(map(str, digits.digits)))
    assert isinstance(digits.exponent, int), "JSON has no NaN"
    return coefficient * 10**digits.exponent if digits.exponent > 0 else coefficient


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
