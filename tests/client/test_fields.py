"""Every field of the contract: the router reads what the client sent, and the client shows what a router sent."""

import math
import re
from dataclasses import fields

import pytest

from pdserve.client import (
    Answer,
    Chat,
    Delta,
    Finished,
    Grammar,
    JsonObject,
    JsonSchema,
    Language,
    NamedTool,
    OneOf,
    Options,
    Prompt,
    Regex,
    ToolCall,
    Turn,
)
from pdserve.client.pb import parts_from_pb
from pdserve.client.pb_request import request_to_pb
from pdserve.core.errors import InvalidRequest
from pdserve.core.work import FinishReason
from pdserve.router import request as router_request
from pdserve.router.pb import parse_generate
from pdserve.router.request import GenerateCall
from pdserve.v1 import inference_pb2 as pb

EVERYTHING = Options(
    model="m",
    request_id="label",
    max_tokens=9,
    min_tokens=2,
    n=3,
    temperature=0.5,
    top_k=4,
    top_p=0.25,
    min_p=0.125,
    seed=7,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias={5: -1.5},
    allowed_token_ids=(5, 6),
    banned_token_ids=(8,),
    banned_words=("tea",),
    stop=("x",),
    stop_token_ids=(3,),
    ignore_eos=True,
    include_stop=True,
    top_logprobs=2,
    prompt_logprobs=True,
    structured_output=Regex("a+"),
    priority=-1,
    cache_salt="salt",
    timeout_s=5.0,
)
CLIENT_ONLY = {"timeout_s"}
RENAMED: dict[str, object] = {
    "logit_bias": ((5, -1.5),),
    "structured_output": router_request.RegexOutput("a+"),
}


def sent(prompt: Prompt, options: Options | None = None) -> GenerateCall:
    return parse_generate(request_to_pb(prompt, options or Options(), stream=True).SerializeToString(), 1 << 20)


def test_every_option_arrives_at_the_router_as_it_was_given() -> None:
    call = sent("text", EVERYTHING)
    for name in {field.name for field in fields(Options)} - CLIENT_ONLY:
        given = getattr(EVERYTHING, name)
        assert given not in (None, (), "", {}), f"{name} is not tried"
        assert getattr(call, name) == RENAMED.get(name, given), name


def test_nothing_is_sent_that_was_not_given() -> None:
    assert sent("text") == GenerateCall(input=router_request.TextInput("text"), stream=True)


@pytest.mark.parametrize(
    ("language", "arrived"),
    [
        (JsonSchema('{"type": "null"}'), router_request.JsonSchemaOutput('{"type": "null"}')),
        (JsonSchema({"type": "null"}), router_request.JsonSchemaOutput('{"type": "null"}')),
        (JsonObject(), router_request.JsonObjectOutput()),
        (OneOf(("yes", "no")), router_request.ChoiceOutput(("yes", "no"))),
        (Grammar("start: A"), router_request.GrammarOutput("start: A")),
    ],
)
def test_every_language_arrives(language: Language, arrived: router_request.StructuredOutput) -> None:
    assert sent("text", Options(structured_output=language)).structured_output == arrived


def test_every_part_of_a_chat_arrives() -> None:
    tool = '{"type": "function", "function": {"name": "f"}}'
    chat = Chat(
        (
            Turn("user", "hi", name="ann"),
            Turn("assistant", None, tool_calls=(ToolCall("c1", "f", "{}"),), reasoning="hm"),
            Turn("tool", "4", tool_call_id="c1"),
        ),
        tools=(tool, {"type": "function", "function": {"name": "f"}}),
        tool_choice=NamedTool("f"),
        add_generation_prompt=False,
        continue_final_message=True,
        template_arguments={"enable_thinking": False},
        parse_output=False,
    )
    assert sent(chat).input == router_request.ChatInput(
        turns=(
            router_request.ChatTurn("user", "hi", name="ann"),
            router_request.ChatTurn(
                "assistant", None, tool_calls=(router_request.ToolCall("c1", "f", "{}"),), reasoning="hm"
            ),
            router_request.ChatTurn("tool", "4", tool_call_id="c1"),
        ),
        add_generation_prompt=False,
        tools=(tool, tool),
        continue_final_message=True,
        template_arguments='{"enable_thinking": false}',
        tool_mode=router_request.ToolMode.NAMED,
        tool_name="f",
        parse_output=False,
    )


@pytest.mark.parametrize(
    ("choice", "mode"),
    [
        ("auto", router_request.ToolMode.AUTO),
        ("none", router_request.ToolMode.NONE),
        ("required", router_request.ToolMode.REQUIRED),
    ],
)
def test_every_tool_choice_arrives(choice: str, mode: router_request.ToolMode) -> None:
    given = sent(Chat((Turn("user", "hi"),), tool_choice=choice)).input  # type: ignore[arg-type] # each is of the literal
    assert isinstance(given, router_request.ChatInput)
    assert given.tool_mode is mode


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ((1, -1), Options(), "token_ids: "),
        ("text", Options(logit_bias={-1: 1.0}), "logit_bias: "),
        ("text", Options(n="two"), "n: "),  # type: ignore[arg-type] # what a program without types may pass
        ("text", Options(stop=(b"\xff",)), "stop: "),  # type: ignore[arg-type] # what a program without types may pass
        ("text", Options(structured_output=JsonSchema({"a": math.nan})), "an object that is no JSON"),
        (Chat((Turn("user", "hi"),), tools=({"a": object()},)), Options(), "an object that is no JSON"),
        (Chat((Turn("user", "hi"),), tool_choice="must"), Options(), "tool_choice 'must' is none of"),  # type: ignore[arg-type] # what a program without types may pass
    ],
)
def test_what_a_field_cannot_hold_is_refused_with_its_name(prompt: Prompt, options: Options, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        request_to_pb(prompt, options, stream=True)


def collected(*messages: pb.GenerateResponse) -> Answer:
    answer = Answer()
    for message in messages:
        for part in parts_from_pb(message, 0.5):
            answer.add(part)
    return answer


def test_sequences_are_told_apart_however_they_are_mixed() -> None:
    answer = collected(
        pb.GenerateResponse(deltas=[pb.Delta(sequence=1, text="b", token_ids=[2], logprobs=[-2.0])]),
        pb.GenerateResponse(
            deltas=[
                pb.Delta(text="a", token_ids=[1], logprobs=[-1.0]),
                pb.Delta(sequence=1, text="B", token_ids=[3, 4], logprobs=[-3.0, -4.0]),
            ],
            finished=[pb.Finished(sequence=1, reason=pb.FINISH_REASON_LENGTH)],
        ),
        pb.GenerateResponse(finished=[pb.Finished(reason=pb.FINISH_REASON_STOP_SEQUENCE, stop="x")]),
    )
    first, second = answer.choices
    assert (first.sequence, first.text, first.token_ids, first.logprobs) == (0, "a", [1], [-1.0])
    assert (second.sequence, second.text, second.token_ids, second.logprobs) == (1, "bB", [2, 3, 4], [-2.0, -3.0, -4.0])
    assert first.finished == Finished(FinishReason.STOP_SEQUENCE, "x")
    assert second.finished == Finished(FinishReason.LENGTH, sequence=1)
    assert (answer.text, answer.token_ids, answer.finished) == ("a", [1], first.finished)
    assert [delta.sequence for delta in answer.deltas] == [1, 0, 1]


def test_scores_of_prompt_and_answer_are_whole() -> None:
    top = pb.TopLogprobs(token_ids=[5, 6], logprobs=[-0.5, -1.0])
    answer = collected(
        pb.GenerateResponse(prompt=[pb.ScoredToken(token_id=1)]),
        pb.GenerateResponse(prompt=[pb.ScoredToken(token_id=2, logprob=-0.25, top=top)]),
        pb.GenerateResponse(deltas=[pb.Delta(text="a", token_ids=[5], logprobs=[-0.5], top_logprobs=[top])]),
    )
    assert [(token.token_id, token.logprob) for token in answer.prompt] == [(1, None), (2, -0.25)]
    assert answer.prompt[1].top_logprobs == ((5, -0.5), (6, -1.0))
    assert answer.choices[0].top_logprobs == [((5, -0.5), (6, -1.0))]


def test_tool_calls_and_reasoning_are_put_together() -> None:
    gained = [
        pb.ToolCallDelta(index=1, id="c2", name="g"),
        pb.ToolCallDelta(index=0, id="c1", name="f", arguments='{"x"'),
        pb.ToolCallDelta(index=0, arguments=": 1}"),
        pb.ToolCallDelta(index=1, arguments="{}"),
    ]
    answer = collected(
        pb.GenerateResponse(deltas=[pb.Delta(reasoning="h")]),
        pb.GenerateResponse(deltas=[pb.Delta(reasoning="m", tool_calls=gained[:2])]),
        pb.GenerateResponse(deltas=[pb.Delta(tool_calls=gained[2:])]),
    )
    (choice,) = answer.choices
    assert (choice.text, choice.reasoning) == ("", "hm")
    assert choice.tool_calls == [ToolCall("c1", "f", '{"x": 1}'), ToolCall("c2", "g", "{}")]


def test_answer_that_has_not_begun_is_empty() -> None:
    answer = Answer()
    assert (answer.text, answer.token_ids, answer.finished, answer.choices) == ("", [], None, [])
    answer.add(Delta("a", (1,), (-1.0,), 0.1))
    assert answer.text == "a"
