"""One grammar, compiled: a matcher at the beginning of the language, from which every answer starts with a copy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar.checks import check, is_gbnf
from pdserve.grammar.outcome import GrammarRefused
from pdserve.grammar.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists for type checkers only

MAX_REASON_CHARS = 300
LEXER_STATES = 20_000
"""States of the lexer that one answer may visit, 1 to 2 kB each; an answer that needs more fails by name."""
SCHEMA_OPTIONS: "JsonCompileOptions" = {
    # Bounded: a small model that likes line breaks would otherwise never close a bracket.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}",
    "lenient": False,
    "coerce_one_of": False,
}


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar at its beginning, over one vocabulary. Shared: only copies of `start` move."""

    start: LLMatcher
    vocabulary: GrammarVocabulary


def compile_grammar(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    """Compile, and see that an answer can begin. Raises GrammarRefused with the library's reason.

    Time and memory are bounded by the library's limits; other threads run meanwhile. Deep grammars need a deep stack: see
    `compiler`.
    """
    check(grammar)
    try:
        source = _source(grammar)
    except ValueError as error:
        raise GrammarRefused(_line(str(error))) from None
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
    start = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
    if start.is_error():
        raise GrammarRefused(_line(start.get_error()))
    trial = start.deep_copy()
    first = trial.compute_bitmask()
    reason = trial.get_error() if trial.is_error() else ""
    if reason and "NoExtension" not in reason:
        raise GrammarRefused(_line(reason))
    if reason or not any(first):
        raise GrammarRefused("no answer can satisfy it")
    return CompiledGrammar(start, vocabulary)


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=SCHEMA_OPTIONS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(_lark(grammar.text))


def _lark(text: str) -> str:
    """Return a grammar in Lark's notation, which it may be in already."""
    if not is_gbnf(text):
        return text
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise GrammarRefused(_line(str(error))) from None
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None


def _line(reason: str) -> str:
    """Return the library's reason as one short line."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 1] + "…"
