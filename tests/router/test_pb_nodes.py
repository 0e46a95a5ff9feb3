"""What a router submits is what a node understands, and what a node says is what the router understands: both sides' own code."""

from dataclasses import replace
from typing import cast, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.ids import Incarnation, LegKey, SessionKey, TransferId
from pdserve.core.work import FinishReason, Grammar, GrammarKind, SampledToken, Sampling, TokenScore
from pdserve.node import pb as node_pb
from pdserve.node.pb_work import work_from_pb
from pdserve.router.events import Adopted, FirstToken, LegEvent, PromptScored
from pdserve.router.instructions import Submit
from pdserve.router.pb_nodes import MAX_IDS_PER_MESSAGE, SubmitFacts, cancel_message, events_from_pb, submit_messages
from pdserve.v1 import node_pb2

P, D, R = Incarnation(b"P" * 16), Incarnation(b"D" * 16), Incarnation(b"R" * 16)
SESSION_ID = 7
LEG = LegKey(SessionKey(R, SESSION_ID), 3)
NOW_S = 100.0
ids = st.integers(0, 150_000)
id_sets = st.frozensets(ids, max_size=5)
floats = st.floats(-50, 50, width=32)

samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 100, width=32),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.125, 1, width=32),
    min_p=st.floats(0, 0.5, width=32),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.floats(0.125, 100, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(ids, floats, max_size=4).map(lambda bias: tuple(sorted(bias.items()))),
    allowed_token_ids=id_sets,
    banned_token_ids=id_sets,
    banned_sequences=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text("{}ab", min_size=1, max_size=20)),
)
facts = st.builds(
    SubmitFacts,
    session_id=st.just(SESSION_ID),
    label=st.text("ab", max_size=5),
    prompt_ids=st.lists(ids, min_size=1, max_size=20).map(tuple),
    sampling=samplings,
    max_tokens=st.just(50),
    stop_token_ids=id_sets,
    ignore_eos=st.booleans(),
    deadline_s=st.sampled_from([0.0, 5.0]),
    age_s=st.sampled_from([0.0, 2.0]),
    min_tokens=st.integers(0, 50),
    top_logprobs=st.integers(0, 20),
)
submits = st.builds(
    Submit,
    attempt=st.just(LEG.attempt),
    prefill=st.just(P),
    decode=st.just(D),
    transfer_id=st.just(TransferId(b"t" * 16)),
    output_ids=st.lists(ids, max_size=4).map(tuple),
    first_sequence=st.integers(0, 3),
    num_sequences=st.just(1),
    prompt_logprobs=st.booleans(),
)


@given(facts, submits)
@settings(max_examples=200, deadline=None)
def test_a_submit_arrives_field_by_field(given_facts: SubmitFacts, submit: Submit) -> None:
    [message] = submit_messages(given_facts, submit)
    wire = node_pb2.AttachRequest.FromString(message.SerializeToString()).submit
    work = work_from_pb(wire, R, tuple(wire.prompt_ids), NOW_S)
    assert work.leg == LEG
    for name in ("label", "prompt_ids", "sampling", "max_tokens", "stop_token_ids", "ignore_eos", "min_tokens"):
        assert getattr(work, name) == getattr(given_facts, name), name
    for name in (
        "prefill",
        "decode",
        "transfer_id",
        "output_ids",
        "first_sequence",
        "num_sequences",
        "prompt_logprobs",
    ):
        assert getattr(work, name) == getattr(submit, name), name
    assert work.top_logprobs == given_facts.top_logprobs
    assert work.arrived_s == NOW_S - given_facts.age_s
    assert work.deadline_s == (NOW_S + 5.0 if given_facts.deadline_s else None)


@given(
    facts, submits, st.sampled_from([0, 1000, 512 << 10]), st.sampled_from([0, 100_000]), st.sampled_from([1, 300_000])
)
@settings(max_examples=20, deadline=None)
def test_no_part_of_a_submit_is_over_a_mebibyte(
    given_facts: SubmitFacts, submit: Submit, num_grammar: int, num_output: int, num_prompt: int
) -> None:
    """Prompt, output, lists and grammar together; the parts join to the prompt."""
    grammar = Grammar(GrammarKind.LARK, "x" * num_grammar)
    listed = frozenset(range(2_000_000, 2_004_096))
    sampling = replace(given_facts.sampling, grammar=grammar, allowed_token_ids=listed, banned_token_ids=listed)
    prompt = tuple(2**31 - index for index in range(num_prompt))
    messages = submit_messages(
        replace(given_facts, sampling=sampling, prompt_ids=prompt), replace(submit, output_ids=(150_000,) * num_output)
    )
    assert max(message.ByteSize() for message in messages) < 1 << 20
    first, *rest = messages
    parts = [first.submit.prompt_ids, *(message.submit_part.prompt_ids for message in rest)]
    assert tuple(token_id for part in parts for token_id in part) == prompt
    assert len(messages) <= 2 + num_prompt // MAX_IDS_PER_MESSAGE


scores = st.floats(-20, 0, width=32)
tops = st.lists(st.tuples(ids, scores), min_size=1, max_size=3).map(tuple)
tokens = st.builds(
    SampledToken,
    index=st.integers(0, 90),
    token_id=ids,
    logprob=scores,
    finish_reason=st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]),
    sequence=st.integers(0, 63),
    top=st.just(()) | tops,
)


def heard(event: node_pb2.LegEvent) -> LegEvent:
    [(session_id, said)] = events_from_pb(P, node_pb2.StepOutput(events=[event]))
    assert session_id == SESSION_ID
    assert isinstance(said, get_args(LegEvent))
    return cast("LegEvent", said)


@given(st.lists(tokens, max_size=4).map(tuple), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_first_tokens_arrive_with_sequence_and_alternatives(said: tuple[SampledToken, ...], num_cached: int) -> None:
    first = heard(node_pb.first_token_event(LEG, said, num_cached, {"prefill.compute": 0.5}))
    assert first == FirstToken(P, LEG.attempt, said, num_cached, {"prefill.compute": 0.5})
    assert heard(node_pb.adopted_event(LEG, said, {})) == Adopted(P, LEG.attempt, said, {})


@given(st.lists(st.tuples(scores, tops), max_size=4), st.integers(1, 9), st.booleans())
@settings(max_examples=100, deadline=None)
def test_prompt_scores_arrive(
    rows: list[tuple[float, tuple[tuple[int, float], ...]]], start: int, has_top: bool
) -> None:
    said = tuple(TokenScore(logprob, top if has_top else ()) for logprob, top in rows)
    assert heard(node_pb.prompt_scores_event(LEG, start, said)) == PromptScored(P, LEG.attempt, start, said)


def test_cancels_name_their_sequences() -> None:
    assert list(cancel_message(7, 3, "stop", (2, 5)).cancel.sequences) == [2, 5]
    assert not cancel_message(7, 3, "left").cancel.sequences
