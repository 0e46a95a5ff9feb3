"""The vocabulary of the default model, read once."""

import pytest

from pdserve.core.models import resolve_model_dir
from pdserve.grammar.vocabulary import GrammarVocabulary, load_vocabulary
from tests.grammar.walks import EOS, MODEL, VOCAB_SIZE


@pytest.fixture(scope="session")
def vocabulary() -> GrammarVocabulary:
    return load_vocabulary(resolve_model_dir(MODEL), VOCAB_SIZE, [EOS])
