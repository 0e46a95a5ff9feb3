"""Walks through a grammar: what random choices under the mask make, and whether given texts are let through."""

import random

import numpy as np

from pdserve.core.work import Grammar, GrammarKind
from pdserve.engine.grammar import GrammarMatcher
from pdserve.grammar.compiling import compile_grammar
from pdserve.grammar.vocabulary import GrammarVocabulary

MODEL = "smollm2-135m-instruct"
VOCAB_SIZE, EOS = 49152, 2
MAX_STEPS = 400
WAYS_OUT = ('"', "}", "]", ",", '":', "0", "1", "a", "b", "@", ".", ":", "/")
"""Tokens that lead somewhere: a walk of random tokens alone never ends a string."""


class NoEnd(AssertionError):
    """A walk was long enough; the grammar lets answers be longer."""


def allowed_ids(matcher: GrammarMatcher, vocab_size: int = VOCAB_SIZE) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the ids that may come next."""
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def matcher_of(kind: GrammarKind, text: str, vocabulary: GrammarVocabulary) -> GrammarMatcher:
    """Compile and stand at the beginning."""
    return GrammarMatcher(compile_grammar(Grammar(kind, text), vocabulary))


def random_answer(
    matcher: GrammarMatcher, vocabulary: GrammarVocabulary, seed: int, exits: tuple[str, ...] = WAYS_OUT
) -> str:
    """Choose any allowed token until the end token is chosen; later on rather those that lead out of strings and lists."""
    rng = random.Random(seed)
    ways_out = np.array([vocabulary.tokenizer.tokenize_str(text)[0] for text in exits])
    ids: list[int] = []
    while len(ids) < MAX_STEPS:
        allowed = allowed_ids(matcher)
        assert allowed.size, "no token may follow"
        if EOS in allowed and (allowed.size == 1 or rng.random() < 0.5):
            return vocabulary.tokenizer.decode_bytes(ids).decode()
        others = allowed[allowed != EOS]
        at = np.minimum(np.searchsorted(others, ways_out), others.size - 1)
        out = ways_out[others[at] == ways_out]
        choices = out if out.size and rng.random() < (0.3 if len(ids) < 60 else 0.95) else others
        ids.append(int(choices[rng.randrange(choices.size)]))
        matcher.accept(ids[-1])
    raise NoEnd(f"no end within {MAX_STEPS} tokens: {vocabulary.tokenizer.decode_str(ids)!r}")


def lets_through(matcher: GrammarMatcher, vocabulary: GrammarVocabulary, text: str) -> bool:
    """Whether every token of `text` is allowed in turn, and the end after the last."""
    for token_id in vocabulary.tokenizer.tokenize_str(text):
        if token_id not in allowed_ids(matcher):
            return False
        matcher.accept(token_id)
    return EOS in allowed_ids(matcher)
