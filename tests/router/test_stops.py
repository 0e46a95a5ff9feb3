"""Stop texts with everything that goes with them: include_stop, min_tokens, stop ids, hand-over borders (failure class 18)."""

import codecs
import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.core.work import FinishReason, SampledToken
from pdserve.router.output import OutputText, joined
from pdserve.router.sequence import EndRules, Sequence
from pdserve.router.stops import StopMatcher
from tests.router.models import byte_level_tokenizer, sentencepiece_tokenizer, vocabulary_of

TOKENIZER = byte_level_tokenizer()
VOCABULARY = vocabulary_of(TOKENIZER)
NUM_IDS = TOKENIZER.get_vocab_size(with_added_tokens=True)
EOS = TOKENIZER.encode("<|im_end|>").ids[0]
PIECES = sentencepiece_tokenizer()
PIECE_VOCABULARY = vocabulary_of(PIECES)
LETTERS = {letter: TOKENIZER.encode(letter).ids[0] for letter in "abcdef"}


def cut(pieces: list[str], stops: list[str], *, include: bool, num_exempt: int) -> tuple[str, str | None]:
    """The definition: the first end of a stop that lies in a piece that is not exempt; the longest stop that ends there."""
    text = "".join(pieces)
    exempt = len("".join(pieces[:num_exempt]))
    for end in range(exempt + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


few_letters = st.text("abc", min_size=1, max_size=4)
stop_lists = st.lists(few_letters, max_size=4)


@given(st.lists(st.text("abc", max_size=3), max_size=8), stop_lists, st.booleans(), st.integers(0, 4))
@example(["ab", "c"], ["ab", "abc"], False, 1)
@example(["ab", "x"], ["ab", "abc"], False, 1)
@settings(max_examples=1500, deadline=None)
def test_the_cut_is_where_the_definition_says(
    pieces: list[str], stops: list[str], include: bool, num_exempt: int
) -> None:
    matcher = StopMatcher(stops, include=include, num_exempt=num_exempt)
    shown, matched = "", None
    for piece in pieces:
        step = matcher.push(piece)
        shown, matched = shown + step.text, step.matched
        if matched is not None:
            break
    if matched is None:
        shown += matcher.flush()
    assert (shown, matched) == cut(pieces, stops, include=include, num_exempt=num_exempt)


CONTINUATIONS = ["".join(letters) for length in range(5) for letters in itertools.product("abc", repeat=length)]


def ways_on(letters: str, num_exempt: int) -> list[list[str]]:
    """Every way to cut a continuation between the exempt pieces that are left and those behind them."""
    if num_exempt <= 0:
        return [[letters]]
    empty = [""] * (num_exempt - 1)
    return [[letters[:border], *empty, letters[border:]] for border in range(len(letters) + 1)]


@given(st.lists(st.text("abc", max_size=2), max_size=4), stop_lists, st.booleans(), st.integers(0, 5))
@example(["a"], ["abc", "b"], False, 0)
@example(["b", ""], ["a", "baa"], False, 2)
@settings(max_examples=300, deadline=None)
def test_what_is_held_back_is_what_some_continuation_takes_back(
    pieces: list[str], stops: list[str], include: bool, num_exempt: int
) -> None:
    """The necessary hold-back, by trying every continuation up to the longest stop's length."""
    matcher = StopMatcher(stops, include=include, num_exempt=num_exempt)
    for count, piece in enumerate(pieces, 1):
        if matcher.push(piece).matched is not None:
            return
        text = "".join(pieces[:count])
        least = len(text)
        for more in (way for letters in CONTINUATIONS for way in ways_on(letters, num_exempt - count)):
            answer, matched = cut([*pieces[:count], *more], stops, include=include, num_exempt=num_exempt)
            least = min(least, len(answer)) if matched is not None else least
        assert matcher.held == text[least:]


def decoded(ids: list[int]) -> str:
    """Text that is final after these ids: all but the bytes of a character that is not whole."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(VOCABULARY.token_bytes, ids)))


def pieces_of(ids: list[int]) -> list[str]:
    """Cut the one-shot text by the token that made each character final; an unfinished end goes with the last token."""
    lengths = [len(decoded(ids[:count])) for count in range(len(ids) + 1)]
    whole = str(TOKENIZER.decode(ids, skip_special_tokens=True))
    pieces = [whole[start:end] for start, end in itertools.pairwise(lengths)]
    if pieces:
        pieces[-1] += whole[lengths[-1] :]
    return pieces


def chunks(ids: list[int], borders: set[int]) -> list[list[int]]:
    cuts = sorted({0, len(ids), *(border for border in borders if border < len(ids))})
    return [list(range(start, end)) for start, end in itertools.pairwise(cuts)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[str]]:
    """Ids of letters, of any bytes and of special tokens, and stops that their text holds, or begins with, or does not hold."""
    few = st.sampled_from([*LETTERS.values(), *TOKENIZER.encode("é€😀").ids])
    ids = draw(st.lists(st.one_of(few, few, st.integers(3, NUM_IDS - 1), st.just(0)), min_size=1, max_size=12))
    whole = str(TOKENIZER.decode(ids, skip_special_tokens=True))
    spots = st.integers(0, max(0, len(whole) - 1))
    stops = [whole[spot : spot + draw(st.integers(1, 4))] for spot in draw(st.lists(spots, max_size=3))]
    stops += draw(st.lists(st.text("ab\ufffd", min_size=1, max_size=3), max_size=1))
    return ids, [stop for stop in stops if stop]


@given(answers(), st.sets(st.integers(1, 11)), st.booleans(), st.integers(0, 6), st.booleans())
@settings(max_examples=600, deadline=None)
def test_deltas_join_to_the_one_shot_text_cut_at_the_first_stop(
    answer: tuple[list[int], list[str]], borders: set[int], include: bool, min_tokens: int, is_doubled: bool
) -> None:
    """Whatever the batches and the border between the nodes, and with copies of tokens that both nodes report."""
    ids, stops = answer
    output = OutputText(VOCABULARY.detokenizer(), stops, include_stop=include, min_tokens=min_tokens)
    sequence = Sequence(EndRules(len(ids), frozenset(), ignore_eos=True), output)
    tokens = [SampledToken(index, token_id, -1.0) for index, token_id in enumerate(ids)]
    steps = []
    for chunk in chunks(ids, borders):
        first = max(0, chunk[0] - is_doubled)
        steps.append(sequence.accept(tokens[first : chunk[-1] + 1], frozenset()))
        so_far = joined(steps).text
        assert sequence.end is not None or decoded(ids[: chunk[-1] + 1]).startswith(so_far), (
            "what is not final was sent"
        )
    shown = joined(steps)
    pieces = pieces_of(ids)
    text, matched = cut(pieces, stops, include=include, num_exempt=min_tokens)
    assert sequence.end is not None
    assert (shown.text, sequence.end.stop or None) == (text, matched)
    expected = FinishReason.LENGTH if matched is None else FinishReason.STOP_SEQUENCE
    assert sequence.end.reason is expected
    given_ids = [token.token_id for token in shown.tokens]
    lengths = list(itertools.accumulate(map(len, pieces)))
    completed = next((index for index, length in enumerate(lengths) if length >= len(text)), 0)
    if matched is None or include:
        assert given_ids == ids[: len(given_ids)]
        assert len(given_ids) == (len(ids) if matched is None else completed + 1)
    else:
        within = sum(length <= len(text) for length in lengths)
        assert given_ids == ids[: len(given_ids)]
        assert len(given_ids) <= within
    assert sequence.num_shown_tokens == len(given_ids)


@given(
    st.lists(st.integers(0, PIECES.get_vocab_size(with_added_tokens=True) - 1), min_size=1, max_size=10),
    st.lists(st.text("ab é\ufffd", min_size=1, max_size=3), max_size=2),
    st.lists(st.integers(0, 20), max_size=2),
    st.booleans(),
    st.integers(0, 4),
)
@settings(max_examples=300, deadline=None)
def test_the_same_holds_for_vocabularies_of_pieces(
    ids: list[int], stops: list[str], spots: list[int], include: bool, min_tokens: int
) -> None:
    """There a run of byte tokens becomes text when it ends: it belongs to the token that ends it."""
    detokenizer = PIECE_VOCABULARY.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    pieces[-1] += detokenizer.finish()
    whole = str(PIECES.decode(ids, skip_special_tokens=True))
    assert "".join(pieces) == whole
    stops = [*stops, *(whole[spot : spot + 2] for spot in spots if whole[spot : spot + 2])]
    output = OutputText(PIECE_VOCABULARY.detokenizer(), stops, include_stop=include, min_tokens=min_tokens)
    sequence = Sequence(EndRules(len(ids), frozenset(), ignore_eos=True), output)
    shown = joined(
        sequence.accept([SampledToken(index, token_id, -1.0)], frozenset()) for index, token_id in enumerate(ids)
    )
    assert sequence.end is not None
    expected = cut(pieces, stops, include=include, num_exempt=min_tokens)
    assert (shown.text, sequence.end.stop or None) == expected


def ended(ids: list[int], stops: list[str], *, stop_ids: frozenset[int], include: bool = False) -> tuple[str, Sequence]:
    output = OutputText(VOCABULARY.detokenizer(), stops, include_stop=include)
    sequence = Sequence(EndRules(20, stop_ids, ignore_eos=False), output)
    shown = sequence.accept([SampledToken(i, token, -1.0) for i, token in enumerate(ids)], frozenset({EOS}))
    return shown.text, sequence


def test_the_text_of_a_stop_id_is_shown_only_with_include_stop() -> None:
    a, b, c = (LETTERS[letter] for letter in "abc")
    for include, text in ((False, "ab"), (True, "abc")):
        shown, sequence = ended([a, b, c], [], stop_ids=frozenset({c}), include=include)
        assert sequence.end is not None
        assert (shown, sequence.end.reason, sequence.end.stop_token_id) == (text, FinishReason.STOP, c)
        assert sequence.num_shown_tokens == 3, "it is counted either way"


def test_special_tokens_have_no_text_not_even_as_stops() -> None:
    shown, sequence = ended([LETTERS["a"], EOS], [], stop_ids=frozenset(), include=True)
    assert (shown, sequence.num_shown_tokens) == ("a", 2)


def test_a_stop_text_that_a_shown_stop_id_completes_ends_the_answer() -> None:
    a, b, c = (LETTERS[letter] for letter in "abc")
    shown, sequence = ended([a, b, c], ["bc"], stop_ids=frozenset({c}), include=True)
    assert sequence.end is not None
    assert (shown, sequence.end.reason, sequence.end.stop) == ("abc", FinishReason.STOP_SEQUENCE, "bc")
    shown, sequence = ended([a, b, c], ["bc"], stop_ids=frozenset({c}))
    assert sequence.end is not None
    assert (shown, sequence.end.reason) == ("ab", FinishReason.STOP), "its text is no part of the answer"


def test_what_stands_behind_an_included_stop_is_cut_off() -> None:
    """One token may hold the end of a stop and more."""
    merged = TOKENIZER.encode("STO").ids
    assert len(merged) == 1
    shown, sequence = ended([LETTERS["a"], *merged, LETTERS["b"]], ["aST"], stop_ids=frozenset(), include=True)
    assert (shown, sequence.num_shown_tokens) == ("aST", 2)
