"""The matcher of a row: what the mask says is what is drawn, a state made from ids stands where the sequence does, and a limit of
the library fails one row."""

import json

import numpy as np
import pytest
import torch

from pdserve.core.models import resolve_model_dir
from pdserve.core.work import Grammar, GrammarKind, Sampling
from pdserve.engine.grammar import GrammarMatcher
from pdserve.grammar.compiling import CompiledGrammar, compile_grammar
from pdserve.grammar.vocabulary import GrammarVocabulary, load_vocabulary
from pdserve.kernels.logits import Chosen, ConstraintFailed, RowFailed, RowState, SampledRow
from pdserve.kernels.sampling import sample
from tests.grammar.walks import EOS, MODEL, VOCAB_SIZE, allowed_ids

pytestmark = pytest.mark.smollm2

OTHER_EOS = 0
SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": false}'
)
WIDE = json.dumps({"type": "object", "properties": {f"field{number}": {"type": "string"} for number in range(1500)}})


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    """With 40 ids of padding, and two ends."""
    return load_vocabulary(resolve_model_dir(MODEL), VOCAB_SIZE + 40, [EOS, OTHER_EOS])


def compiled(vocabulary: GrammarVocabulary, text: str = SCHEMA) -> CompiledGrammar:
    return compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, text), vocabulary)


def ids_of(vocabulary: GrammarVocabulary, text: str) -> list[int]:
    return list(vocabulary.tokenizer.tokenize_str(text))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_random_logits_under_the_mask_make_the_language(vocabulary: GrammarVocabulary, temperature: float) -> None:
    """What `sample` draws, not what the mask says: nothing else than the mask keeps random logits to the schema."""
    torch.manual_seed(3)
    sampling = Sampling(temperature=temperature, seed=4, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA))
    for sequence in range(3):
        state = RowState(sampling, (1, 2, 3), (), matcher=GrammarMatcher(compiled(vocabulary)))
        ids: list[int] = []
        while not ids or ids[-1] not in (EOS, OTHER_EOS):
            row = SampledRow(sampling, sequence, len(ids), state=state)
            (choice,) = sample(3.0 * torch.randn(1, vocabulary.size), [row])
            assert isinstance(choice, Chosen), choice
            ids.append(choice.token_id)
            assert len(ids) < 400, "no end"
            state.accept(choice.token_id)
        assert json.loads(vocabulary.tokenizer.decode_bytes(ids[:-1])) in ({"a": "x"}, {"a": "y"})


def test_a_state_made_from_ids_stands_where_the_sequence_does(vocabulary: GrammarVocabulary) -> None:
    grammar = compiled(vocabulary)
    walked = GrammarMatcher(grammar)
    ids = ids_of(vocabulary, '{"a": "x"}')
    for cut, token_id in enumerate([*ids, EOS]):
        made = RowState(Sampling(), (9,), tuple(ids[:cut]), matcher=GrammarMatcher(grammar))
        mask = np.zeros(-(-vocabulary.size // 32), np.int32)
        walked.fill(mask)
        assert np.array_equal(made.mask(vocabulary.size), mask), f"after {cut} tokens"
        walked.accept(token_id)


def test_copies_do_not_move_each_other(vocabulary: GrammarVocabulary) -> None:
    grammar = compiled(vocabulary)
    first, second = GrammarMatcher(grammar), GrammarMatcher(grammar)
    before = allowed_ids(second, vocabulary.size)
    for token_id in ids_of(vocabulary, '{"a"'):
        first.accept(token_id)
    assert np.array_equal(allowed_ids(second, vocabulary.size), before)
    assert np.array_equal(allowed_ids(GrammarMatcher(grammar), vocabulary.size), before)


def test_the_end_is_every_end_token_and_only_at_the_end(vocabulary: GrammarVocabulary) -> None:
    matcher = GrammarMatcher(compiled(vocabulary))
    for token_id in ids_of(vocabulary, '{"a": "y"}'):
        assert not {EOS, OTHER_EOS} & set(allowed_ids(matcher, vocabulary.size).tolist())
        matcher.accept(token_id)
    assert allowed_ids(matcher, vocabulary.size).tolist() == [OTHER_EOS, EOS]


def test_ids_without_text_are_never_allowed(vocabulary: GrammarVocabulary) -> None:
    matcher = GrammarMatcher(compiled(vocabulary, "{}"))
    for token_id in ids_of(vocabulary, '["'):
        assert allowed_ids(matcher, vocabulary.size).max() < VOCAB_SIZE
        matcher.accept(token_id)
    assert allowed_ids(matcher, vocabulary.size).max() < VOCAB_SIZE


def test_a_model_with_fewer_ids_than_its_tokenizer(vocabulary: GrammarVocabulary) -> None:
    """Some models' tokenizers know more tokens than their embedding has rows: the mask is as long as the model's."""
    matcher = GrammarMatcher(compiled(vocabulary))
    short = np.zeros(100, np.int32)
    matcher.fill(short)
    whole = np.zeros(-(-vocabulary.size // 32), np.int32)
    matcher.fill(whole)
    assert np.array_equal(short, whole[:100])


@pytest.mark.parametrize("token_id", [5000, VOCAB_SIZE + 39, 2**31])
def test_a_token_that_does_not_follow_fails_the_row_at_its_next_mask(
    vocabulary: GrammarVocabulary, token_id: int
) -> None:
    matcher = GrammarMatcher(compiled(vocabulary))
    matcher.accept(token_id)
    matcher.accept(ids_of(vocabulary, "{")[0])
    with pytest.raises(ConstraintFailed, match=f"after token {token_id}: "):
        allowed_ids(matcher, vocabulary.size)


def test_a_mask_that_the_library_gives_up_fails_by_its_reason(vocabulary: GrammarVocabulary) -> None:
    text = 'start: "ab" X\nX: /.*a.{30}b.*/ & /.*c.{30}d.*/ & /.*e.{20}f.*/\n'
    matcher = GrammarMatcher(compile_grammar(Grammar(GrammarKind.LARK, text), vocabulary))
    with pytest.raises(ConstraintFailed, match="too many"):
        for step in range(60):
            allowed = allowed_ids(matcher, vocabulary.size)
            matcher.accept(int(allowed[step * 7919 % len(allowed)]))


def test_a_limit_of_the_library_fails_its_row_and_no_other(vocabulary: GrammarVocabulary) -> None:
    sampling = Sampling(grammar=Grammar(GrammarKind.JSON_SCHEMA, WIDE))
    ids = ids_of(vocabulary, '{"')
    state = RowState(sampling, (1,), tuple(ids), matcher=GrammarMatcher(compiled(vocabulary, WIDE)))
    rows = [SampledRow(Sampling(), 0, 0), SampledRow(sampling, 0, len(ids), state=state), SampledRow(Sampling(), 0, 0)]
    logits = torch.randn(3, vocabulary.size)
    first, wide, last = sample(logits, rows)
    assert isinstance(wide, RowFailed)
    assert "grammar" in wide.reason
    assert wide.is_final
    assert "\n" not in wide.reason
    assert isinstance(first, Chosen)
    assert first.token_id == int(logits[0].argmax())
    assert isinstance(last, Chosen)
