"""The model's tokens, as the grammar library wants them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from pdserve.grammar.outcome import GrammarRefused


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """The tokens of a model. `size` counts the ids that the library knows: the model's, and more if its tokenizer has more."""

    tokenizer: LLTokenizer
    size: int


def load_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> GrammarVocabulary:
    """Read `tokenizer.json` of a model's folder; costs about 0.3 s and 50 MB at 49152 tokens, so once per process.

    `vocab_size` counts the rows of the model's embedding: ids beyond the tokenizer's own are never allowed. Any of
    `eos_token_ids` ends an answer. Raises GrammarRefused if the model cannot be constrained.
    """
    ends = sorted(eos_token_ids)
    if not ends:
        raise GrammarRefused("the model has no end-of-sequence token, so a constrained answer could not end")
    try:
        parsed = json.loads((folder / "tokenizer.json").read_bytes())
    except (OSError, ValueError) as error:
        raise GrammarRefused(f"the model has no tokenizer.json that can be read: {error}") from None
    parsed["truncation"] = parsed["padding"] = None  # they would cut what the library encodes
    try:
        tokenizer = LLTokenizer(json.dumps(parsed), n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        raise GrammarRefused(f"the grammar library cannot use the model's tokenizer: {error}") from None
    return GrammarVocabulary(tokenizer, tokenizer.vocab_size)
