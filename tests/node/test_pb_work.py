"""A submit becomes a leg with every field in its place, or is refused by the name of the field that cannot be used."""

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.work import Grammar, GrammarKind, Sampling
from pdserve.node.pb_work import work_from_pb
from pdserve.v1 import inference_pb2, node_pb2
from tests.node.works import DECODE, PREFILL, ROUTER

NAN = float("nan")


def submit(**changes: object) -> node_pb2.Submit:
    message = node_pb2.Submit(
        session_id=1,
        attempt=1,
        transfer_id=b"T" * 16,
        prefill_incarnation=PREFILL,
        decode_incarnation=DECODE,
        num_prompt_ids=3,
        prompt_ids=[5, 6, 7],
        max_tokens=4,
        sampling=node_pb2.NodeSampling(top_p=1.0),
    )
    message.MergeFrom(node_pb2.Submit(**changes))  # type: ignore[arg-type] # test rows of many types
    return message


def test_what_is_left_out_has_its_stated_meaning() -> None:
    work = work_from_pb(submit(), ROUTER, (5, 6, 7), 0.0)
    assert list(work.sequences) == [0]
    assert (work.min_tokens, work.top_logprobs, work.prompt_logprobs) == (0, 0, False)
    assert work.sampling == Sampling()


def test_every_field_reaches_its_place() -> None:
    sampling = node_pb2.NodeSampling(
        temperature=0.5,
        top_k=7,
        min_p=0.25,
        seed=2**63 + 1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={9: -100.0, 3: 1.5},
        allowed_token_ids=[4, 8],
        banned_token_ids=[1, 1, 2],
        banned_sequences=[inference_pb2.TokenIds(ids=[3, 4]), inference_pb2.TokenIds(ids=[5])],
        grammar=node_pb2.Grammar(kind=node_pb2.GRAMMAR_KIND_REGEX, text="a+"),
    )
    message = submit(
        sampling=sampling,
        num_sequences=3,
        first_sequence=2,
        min_tokens=4,
        top_logprobs=5,
        prompt_logprobs=True,
        stop_token_ids=[11],
        ignore_eos=True,
    )
    work = work_from_pb(message, ROUTER, (5, 6, 7), 0.0)
    assert list(work.sequences) == [2, 3, 4]
    assert (work.min_tokens, work.top_logprobs, work.prompt_logprobs) == (4, 5, True)
    assert (work.stop_token_ids, work.ignore_eos) == (frozenset({11}), True)
    assert work.sampling == Sampling(
        temperature=0.5,
        top_k=7,
        min_p=0.25,
        seed=2**63 + 1,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((3, 1.5), (9, -100.0)),
        allowed_token_ids=frozenset({4, 8}),
        banned_token_ids=frozenset({1, 2}),
        banned_sequences=((3, 4), (5,)),
        grammar=Grammar(GrammarKind.REGEX, "a+"),
    )


def sampling(**changes: object) -> dict[str, object]:
    return {"sampling": node_pb2.NodeSampling(**changes)}  # type: ignore[arg-type] # test rows of many types


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_sequences": 65}, "num_sequences"),
        ({"num_sequences": 3, "first_sequence": 62}, "first_sequence"),
        ({"first_sequence": 64}, "first_sequence"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop_token_ids": range(65)}, "stop_token_ids"),
        ({"output_ids": range(4)}, "max_tokens"),
        (sampling(temperature=NAN), "sampling.temperature"),
        (sampling(repetition_penalty=-1.0), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=100.5), "sampling.repetition_penalty"),
        (sampling(repetition_penalty=NAN), "sampling.repetition_penalty"),
        (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
        (sampling(frequency_penalty=NAN), "sampling.frequency_penalty"),
        (sampling(logit_bias={1: NAN}), "sampling.logit_bias"),
        (sampling(logit_bias={1: 101.0}), "sampling.logit_bias"),
        (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
        (sampling(allowed_token_ids=range(4097)), "sampling.allowed_token_ids"),
        (sampling(banned_token_ids=range(4097)), "sampling.banned_token_ids"),
        (sampling(banned_sequences=[inference_pb2.TokenIds()]), "sampling.banned_sequences"),
        (sampling(banned_sequences=[inference_pb2.TokenIds(ids=range(1025))]), "sampling.banned_sequences"),
        (sampling(grammar=node_pb2.Grammar(text="a")), "sampling.grammar.kind"),
        (sampling(grammar=node_pb2.Grammar(kind=node_pb2.GRAMMAR_KIND_LARK)), "sampling.grammar.text"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        work_from_pb(submit(**changes), ROUTER, (5, 6, 7), 0.0)
    assert raised.value.field == f"submit.{field}"
