"""Regular expressions, choices and grammars: what random choices make is in the language, what is in it is let through."""

import re

import pytest

from pdserve.core.work import Grammar, GrammarKind
from pdserve.grammar.compiling import compile_grammar
from pdserve.grammar.outcome import GrammarRefused
from pdserve.grammar.vocabulary import GrammarVocabulary
from pdserve.router.request import ChoiceOutput
from pdserve.router.structured import grammar_of
from tests.grammar.walks import EOS, allowed_ids, lets_through, matcher_of, random_answer

pytestmark = pytest.mark.smollm2

REGEXES = {
    r"[0-9]{3}-[0-9]{4}": "555-0199",
    r"(yes|no)( please)?": "no please",
    r"[^\n]{1,12}!": "grüß dich!",
    r"(?i)abc|x{2,3}y?": "ABc",
    r"[0-9]+\.[0-9]{2} (EUR|USD)": "12.50 EUR",
    r"^anchored$": "anchored",
    r"[αβγ]+|日本": "日本",
    "a\\\\b\"c'/d": "a\\b\"c'/d",
}
"""Pattern, and a text that it matches as a whole."""

CHOICES = (
    *("yes", "no", "yes, but", 'a "quoted" one', "two\nlines", "back\\slash", "é😀日", " leading", "%json", "/x/"),
    "<|im_end|> ",
)

LARK = """
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,4}/
"""
GBNF = r"""
root ::= list
list ::= "[" (item ("," item)*)? "]"
item ::= [0-9]+ | "null" | list
"""


@pytest.mark.parametrize("pattern", REGEXES)
def test_regex(pattern: str, vocabulary: GrammarVocabulary) -> None:
    for seed in range(5):
        answer = random_answer(matcher_of(GrammarKind.REGEX, pattern, vocabulary), vocabulary, seed)
        assert re.fullmatch(pattern, answer), answer
    text = REGEXES[pattern]
    assert re.fullmatch(pattern, text)
    assert lets_through(matcher_of(GrammarKind.REGEX, pattern, vocabulary), vocabulary, text)
    assert not lets_through(matcher_of(GrammarKind.REGEX, pattern, vocabulary), vocabulary, text + "\n\nand more")


def test_choices(vocabulary: GrammarVocabulary) -> None:
    grammar = grammar_of(ChoiceOutput(CHOICES))
    answers = {
        random_answer(matcher_of(grammar.kind, grammar.text, vocabulary), vocabulary, seed) for seed in range(60)
    }
    assert answers <= set(CHOICES)
    assert len(answers) >= 5
    for text in CHOICES[:-1]:
        assert lets_through(matcher_of(grammar.kind, grammar.text, vocabulary), vocabulary, text), text


def test_a_choice_may_be_the_beginning_of_another(vocabulary: GrammarVocabulary) -> None:
    grammar = grammar_of(ChoiceOutput(("ab", "abc")))
    assert lets_through(matcher_of(grammar.kind, grammar.text, vocabulary), vocabulary, "ab")
    assert lets_through(matcher_of(grammar.kind, grammar.text, vocabulary), vocabulary, "abc")


def test_lark(vocabulary: GrammarVocabulary) -> None:
    for seed in range(10):
        answer = random_answer(matcher_of(GrammarKind.LARK, LARK, vocabulary), vocabulary, seed, (")", "1"))
        value = re.sub(r"\d+", "1", answer)
        assert set(answer) <= set("0123456789+-*/()"), answer
        try:
            compile(value, "answer", "eval")  # the same language as Python's arithmetic
        except SyntaxError:
            pytest.fail(answer)
    assert lets_through(matcher_of(GrammarKind.LARK, LARK, vocabulary), vocabulary, "(1+22)*3-4/(5)")


def test_gbnf(vocabulary: GrammarVocabulary) -> None:
    assert lets_through(matcher_of(GrammarKind.LARK, GBNF, vocabulary), vocabulary, "[1,[],[null,22]]")
    assert not lets_through(matcher_of(GrammarKind.LARK, GBNF, vocabulary), vocabulary, "[1,]")


def test_a_special_token_is_never_text(vocabulary: GrammarVocabulary) -> None:
    """A user's string may hold the characters of an end token; the model may not end its answer with them."""
    matcher = matcher_of(GrammarKind.REGEX, "<.*>", vocabulary)
    assert EOS not in allowed_ids(matcher)
    matcher.accept(vocabulary.tokenizer.tokenize_str("<")[0])
    assert EOS not in allowed_ids(matcher)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (GrammarKind.REGEX, "(a", "unclosed"),
        (GrammarKind.REGEX, r"(a)\1", "backreferences"),
        (GrammarKind.REGEX, "(?=a)b", "look"),
        (GrammarKind.REGEX, r"a\b", "lookaround"),
        (GrammarKind.REGEX, r"[^\s\S]", "no answer"),
        (GrammarKind.REGEX, "\ud800", "Unicode"),
        (GrammarKind.REGEX, "(" * 3000 + "a" + ")" * 3000, "regex"),
        (GrammarKind.LARK, "start: other", "other"),
        (GrammarKind.LARK, "word: /a/", "start"),
        (GrammarKind.LARK, "start: " + "(" * 20000 + '"a"' + ")" * 20000, "nested"),
        (GrammarKind.LARK, 'start: %json {"multipleOf": 1000003}', "%json"),
        (
            GrammarKind.LARK,
            "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "a"',
            "too big",
        ),
        (GrammarKind.LARK, "start: X\nX: /.*a.{30}b.*/ & /.*c.{30}d.*/ & /.*e.{20}f.*/", "too many"),
        (GrammarKind.LARK, "root ::= (", "Expected"),
        (GrammarKind.LARK, "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "deep"),
        (
            GrammarKind.LARK,
            "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"',
            "GBNF",
        ),
        (GrammarKind.LARK, "", "empty"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_reason(
    kind: GrammarKind, text: str, named: str, vocabulary: GrammarVocabulary
) -> None:
    with pytest.raises(GrammarRefused) as caught:
        compile_grammar(Grammar(kind, text), vocabulary)
    assert named in str(caught.value)
    assert len(str(caught.value)) <= 300
