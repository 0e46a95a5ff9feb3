"""The processors against transformers' own, composed by `generate` itself; and what a row's state is made of."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdserve.core.work import Grammar, GrammarKind, Sampling
from pdserve.kernels.gumbel_max import keep
from pdserve.kernels.logits import Chosen, ConstraintFailed, IdCounts, MaskArray, RowFailed, RowState, SampledRow
from pdserve.kernels.processors import process
from pdserve.kernels.sampling import sample
from tests.kernels.generate_order import processors_of_generate

VOCAB = 67
"""Not a multiple of a mask's words."""
IDS = st.integers(0, VOCAB - 1)
GRAMMAR = Grammar(GrammarKind.REGEX, "a")


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    """Any mix of what changes logits and what filters; each is off half of the time."""

    def maybe(some: st.SearchStrategy[float], off: float) -> float:
        return draw(st.one_of(st.just(off), some))

    return Sampling(
        temperature=draw(st.sampled_from((0.3, 1.0, 1.7))),
        top_k=draw(st.sampled_from((0, 1, 5, 40, 1000))),
        top_p=draw(st.sampled_from((1.0, 0.9, 0.5, 1e-6))),
        min_p=draw(st.sampled_from((0.0, 0.03, 0.4))),
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition_penalty=maybe(st.floats(0.25, 4.0), 1.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        logit_bias=tuple(draw(st.dictionaries(IDS, st.floats(-100, 100), max_size=6)).items()),
        allowed_token_ids=draw(st.one_of(st.just(frozenset[int]()), st.frozensets(IDS, min_size=20, max_size=50))),
        banned_token_ids=draw(st.frozensets(IDS, max_size=10)),
        banned_sequences=tuple(
            draw(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), max_size=8))
        ),
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Sampling, list[int], list[int], frozenset[int], int]:
    """A sampling, a prompt, an output (of few ids, so that banned sequences and counts bite), ends, and min_tokens."""
    ids = st.integers(0, 6)
    prompt = draw(st.lists(ids, min_size=1, max_size=6))
    output = draw(st.lists(ids, max_size=12))
    end_ids = draw(st.frozensets(st.integers(7, VOCAB - 1), min_size=1, max_size=3))
    return draw(samplings()), prompt, output, end_ids, draw(st.integers(0, 14))


def logits_of(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def processed(logits: torch.Tensor, *states: RowState) -> torch.Tensor:
    scores = logits.clone()
    assert process(scores, dict(enumerate(states))) == {}
    return scores


@settings(max_examples=400, deadline=None)
@given(situations(), st.integers(0, 2**30))
def test_scores_and_masks_are_those_of_generate(
    situation: tuple[Sampling, list[int], list[int], frozenset[int], int], seed: int
) -> None:
    sampling, prompt, output, end_ids, min_tokens = situation
    logits = logits_of(seed)
    expected, input_ids = logits.clone(), torch.tensor([[*prompt, *output]])
    processors = processors_of_generate(sampling, len(prompt), end_ids, min_tokens)
    is_filter = ["Warper" in type(processor).__name__ for processor in processors]
    assert is_filter == sorted(is_filter)
    for processor, filters in zip(processors, is_filter, strict=True):
        if not filters:
            expected = processor(input_ids, expected)
            assume(not expected.isneginf().all())  # generate forces an id then; see the test of rows that fail
    state = RowState(sampling, prompt, output, end_ids, min_tokens)
    ours = processed(logits, state)
    assert torch.equal(ours.isneginf(), expected.isneginf())
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-5)

    probabilities = expected.clone()
    for processor, filters in zip(processors, is_filter, strict=True):
        probabilities = processor(input_ids, probabilities) if filters else probabilities
    ids, z = keep(expected[0].numpy(), sampling)
    theirs = probabilities[0].softmax(-1)
    border = _distance_to_border(expected[0].double(), sampling)
    assume(border > 1e-5)  # the two arithmetics may part what lies on the border itself
    assert set(ids.tolist()) == set(torch.nonzero(theirs)[:, 0].tolist())
    ours_kept = torch.zeros(VOCAB).index_put((torch.from_numpy(ids),), torch.from_numpy(z).softmax(-1).float())
    torch.testing.assert_close(ours_kept, theirs, rtol=1e-4, atol=1e-6)


def _distance_to_border(scores: torch.Tensor, sampling: Sampling) -> float:
    """How near an id comes to the border of top-p (probability) or min-p (z), in exact enough arithmetic."""
    z = ((scores - scores.max()) / sampling.temperature).sort(descending=True).values
    if sampling.top_k:
        z = z[z >= z[min(sampling.top_k, VOCAB) - 1]]
    near = (z.softmax(-1).cumsum(-1) - sampling.top_p).abs().min() if sampling.top_p < 1 else torch.tensor(1.0)
    if sampling.min_p:
        near = torch.minimum(near, (z - np.log(sampling.min_p)).abs().min())
    # Ids that the other arithmetic rounds to probability 0 are told apart by nobody.
    return float(torch.minimum(near, z.softmax(-1)[z > -torch.inf].min() * 1e33))


@settings(max_examples=150, deadline=None)
@given(situations(), st.data())
def test_a_state_rebuilt_from_ids_is_the_state_that_grew(
    situation: tuple[Sampling, list[int], list[int], frozenset[int], int], data: st.DataObject
) -> None:
    """Failure class 32: penalties and bans after a hand-over or a resume."""
    sampling, prompt, output, end_ids, min_tokens = situation
    split = data.draw(st.integers(0, len(output)))
    grown = RowState(sampling, prompt, output[:split], end_ids, min_tokens)
    for token_id in output[split:]:
        grown.accept(token_id)
    rebuilt = RowState(sampling, prompt, output, end_ids, min_tokens)
    assert grown.position == rebuilt.position == len(output)
    logits = logits_of(3)
    assert torch.equal(processed(logits, grown), processed(logits, rebuilt))


@settings(max_examples=60, deadline=None)
@given(st.lists(situations(), min_size=2, max_size=5))
def test_rows_of_a_batch_are_processed_as_alone(
    batch: list[tuple[Sampling, list[int], list[int], frozenset[int], int]],
) -> None:
    """Failure class 19. The last row has no state: it stays as it is."""
    states = [RowState(*situation) for situation in batch]
    logits = logits_of(len(batch), len(states) + 1)
    scores = processed(logits, *states)
    for index, state in enumerate(states):
        assert torch.equal(scores[index : index + 1], processed(logits[index : index + 1], state))
    assert torch.equal(scores[-1], logits[-1])


def test_order_bias_is_added_before_the_repetition_penalty_and_openai_penalties_after() -> None:
    """Each other order gives another number."""
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias=((1, 3.0),))
    scores = processed(torch.zeros(1, VOCAB), RowState(sampling, [9], [1, 1]))
    assert float(scores[0, 1]) == 3.0 / 2.0 - 1.0 - 2 * 0.5
    assert float(scores[0, 9]) == 0.0


def test_a_banned_sequence_may_begin_in_the_prompt_and_is_free_otherwise() -> None:
    sampling = Sampling(banned_sequences=((3, 4, 5), (8,)))
    assert processed(torch.zeros(1, VOCAB), RowState(sampling, [3], [4])).isneginf().nonzero().tolist() == [
        [0, 5],
        [0, 8],
    ]
    assert processed(torch.zeros(1, VOCAB), RowState(sampling, [4], [3])).isneginf().nonzero().tolist() == [[0, 8]]


def test_a_banned_end_of_sequence_id_is_banned() -> None:
    """generate drops a banned sequence of one end-of-sequence id; whoever writes it here means it."""
    state = RowState(Sampling(banned_sequences=((8,),)), [1], [], frozenset({8}))
    assert processed(torch.zeros(1, VOCAB), state).isneginf().nonzero().tolist() == [[0, 8]]


def test_ends_are_forbidden_before_min_tokens_only() -> None:
    state = RowState(Sampling(), [1], [5], frozenset({2, 7}), 2)
    assert processed(torch.zeros(1, VOCAB), state).isneginf().nonzero().tolist() == [[0, 2], [0, 7]]
    state.accept(5)
    assert not processed(torch.zeros(1, VOCAB), state).isneginf().any()


class Scripted:
    """A matcher that allows what it is told, and remembers what it accepted."""

    def __init__(self, allowed: set[int], failure: str | None = None) -> None:
        self.allowed, self.failure = allowed, failure
        self.accepted: list[int] = []
        self.num_masks = 0

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def fill(self, mask: MaskArray) -> None:
        self.num_masks += 1
        if self.failure is not None:
            raise ConstraintFailed(self.failure)
        assert not mask.any()
        for token_id in self.allowed:
            mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


@pytest.mark.parametrize("allowed", [{0, 31, 32, 63, 64, 66}, {31}, {66}])
def test_a_matcher_masks_and_is_told_every_token(allowed: set[int]) -> None:
    matcher = Scripted(allowed)
    state = RowState(Sampling(grammar=GRAMMAR), [1], [4, 5], matcher=matcher)
    assert matcher.accepted == [4, 5]
    state.accept(6)
    assert matcher.accepted == [4, 5, 6]
    scores = processed(torch.zeros(1, VOCAB), state)
    assert {int(index) for index in (~scores[0].isneginf()).nonzero()} == allowed


def test_rows_that_read_one_state_get_one_mask_and_fail_together() -> None:
    """The first tokens of a request's sequences: a mask for each would cost as often as there are sequences."""
    matcher = Scripted({31, 66})
    sampling = Sampling(temperature=1.0, grammar=GRAMMAR)
    state = RowState(sampling, [1], [], matcher=matcher)
    rows = [SampledRow(sampling, sequence, 0, state=state) for sequence in range(6)]
    chosen = sample(torch.zeros(6, VOCAB), rows)
    assert {choice.token_id for choice in chosen if isinstance(choice, Chosen)} == {31, 66}
    assert matcher.num_masks == 1
    matcher.failure = "broken"
    assert sample(torch.zeros(6, VOCAB), rows) == [RowFailed("broken", is_final=True)] * 6


def test_a_grammar_and_allowed_ids_both_bind() -> None:
    sampling = Sampling(grammar=GRAMMAR, allowed_token_ids=frozenset({3, 31, 40, 900}))
    scores = processed(torch.zeros(1, VOCAB), RowState(sampling, [1], [], matcher=Scripted({31, 40, 41})))
    assert (~scores[0].isneginf()).nonzero()[:, 0].tolist() == [31, 40]


def neighbours_around(state: RowState, sampling: Sampling, logits: torch.Tensor) -> RowFailed:
    """Sample `state`'s row between two others; return its failure, after checking that the others got what they get alone."""
    others = [SampledRow(Sampling(0.8, seed=5), 0, position) for position in (3, 4)]
    answers = sample(logits, [others[0], SampledRow(sampling, 0, state.position, 3, state), others[1]])
    for index, row in ((0, others[0]), (2, others[1])):
        assert answers[index] == sample(logits[index : index + 1], [row])[0]
        assert isinstance(answers[index], Chosen)
    assert isinstance(answers[1], RowFailed)
    return answers[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_allows_nothing_fails_alone_and_says_so(temperature: float) -> None:
    sampling = Sampling(temperature, allowed_token_ids=frozenset({4}), banned_token_ids=frozenset({4}))
    failure = neighbours_around(RowState(sampling, [1], []), sampling, logits_of(1, 3))
    assert "no token is allowed" in failure.reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_matcher_that_breaks_fails_its_row_alone(temperature: float) -> None:
    sampling = Sampling(temperature, grammar=GRAMMAR)
    state = RowState(sampling, [1], [], matcher=Scripted(set(), "grammar: too many steps"))
    assert neighbours_around(state, sampling, logits_of(1, 3)).reason == "grammar: too many steps"


def test_logits_that_a_penalty_makes_infinite_fail_their_row() -> None:
    sampling = Sampling(1.0, repetition_penalty=0.01)
    logits = logits_of(1, 3)
    logits[1, 6] = 3e38
    assert "infinite" in neighbours_around(RowState(sampling, [6], []), sampling, logits).reason


def test_ids_outside_the_vocabulary_touch_nothing() -> None:
    """They would land in the next row."""
    far = VOCAB + 2
    sampling = Sampling(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((far, 50.0), (1, 1.0)),
        allowed_token_ids=frozenset({1, 2, 3, far}),
        banned_token_ids=frozenset({far, 3}),
    )
    inside = Sampling(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((1, 1.0),),
        allowed_token_ids=frozenset({1, 2, 3}),
        banned_token_ids=frozenset({3}),
    )
    logits = logits_of(4, 2)
    scores = processed(logits, RowState(sampling, [far, 2], [far, 1]))
    assert torch.equal(scores[0], processed(logits, RowState(inside, [2], [1]))[0])
    assert torch.equal(scores[1], logits[1])


def test_log_probabilities_are_of_the_unmodified_distribution_whatever_is_processed() -> None:
    logits = logits_of(6)
    best = int(logits.argmax())
    sampling = Sampling(banned_token_ids=frozenset({best}), logit_bias=((5, 90.0),))
    [choice] = sample(logits, [SampledRow(sampling, 0, 0, 4, RowState(sampling, [1], []))])
    expected = torch.log_softmax(logits[0], dim=-1)
    assert isinstance(choice, Chosen)
    assert choice.token_id == 5
    assert choice.logprob == pytest.approx(float(expected[5]), abs=1e-6)
    values, ids = torch.topk(expected, 4)
    assert [token for token, _ in choice.top] == ids.tolist()
    assert [logprob for _, logprob in choice.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert choice.top[0][0] == best


def test_rows_get_as_many_alternatives_as_they_ask_for() -> None:
    rows = [SampledRow(Sampling(), 0, 0, num_top) for num_top in (0, 20, 3, 0)]
    choices = sample(logits_of(2, 4), rows)
    assert [len(choice.top) for choice in choices if isinstance(choice, Chosen)] == [0, 20, 3, 0]
    alone = sample(logits_of(2, 4)[2:3], [rows[2]])
    assert choices[2] == alone[0]


def test_counts_grow() -> None:
    counts = IdCounts([5, 5, 9])
    for token_id in [9, *range(1000, 1200), 1000]:
        counts.add(token_id)
    held = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert held == {5: 2, 9: 2, **dict.fromkeys(range(1000, 1200), 1), 1000: 2}


def test_a_row_without_the_state_that_it_needs_or_with_one_of_another_position_is_a_fault_of_ours() -> None:
    sampling = Sampling(presence_penalty=0.5)
    assert RowState.is_needed(sampling)
    assert RowState.is_needed(Sampling(), min_tokens=1)
    assert not RowState.is_needed(Sampling(1.0, 5, 0.9, 0.1))
    with pytest.raises(ValueError, match="has a state"):
        SampledRow(sampling, 0, 0)
    with pytest.raises(ValueError, match="index 3 has the state of index 2"):
        SampledRow(sampling, 0, 3, state=RowState(sampling, [1], [2, 3]))
