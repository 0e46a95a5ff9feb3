"""Bodies of the HTTP front become the calls that gRPC requests become; what cannot is refused by the client's own names."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest, NotServed, PdserveError
from pdserve.core.setting_faults import MAX_GUESSED_CHARS, did_you_mean
from pdserve.router.http.body import MAX_CONTAINERS, MAX_UNDER_WAY, BodyRoom, parsed_object
from pdserve.router.http.chat_request import ChatFields, parse_chat
from pdserve.router.http.completion_request import DEFAULT_MAX_TOKENS, MAX_PROMPTS, CompletionFields, parse_completion
from pdserve.router.http.errors import HttpFault, param_of
from pdserve.router.http.fields import HARMLESS, MAX_PATH_CHARS, NEUTRAL
from pdserve.router.pb import call_from_pb
from pdserve.router.request import (
    ChatInput,
    ChatTurn,
    ChoiceOutput,
    GrammarOutput,
    JsonObjectOutput,
    JsonSchemaOutput,
    RegexOutput,
    TextInput,
    TokenInput,
    ToolCall,
    ToolMode,
)
from pdserve.router.structured import field_of
from pdserve.router.validation import ServedModel, validate
from pdserve.v1 import inference_pb2 as pb

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
REFUSED = {"best_of", "add_special_tokens"}
"""Fields that are there to be refused."""
USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "p"} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER]} | fields


def every_field() -> dict[str, Any]:
    """Return a body with every field that both contracts have, each with a value of its own."""
    return completion(
        model="m",
        n=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1.5,
        frequency_penalty=0.75,
        logit_bias={"7": -100, "3": 1.5},
        allowed_token_ids=[1, 2],
        banned_token_ids=[3],
        bad_words=["bad"],
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        priority=-2,
        cache_salt="s",
        stream=True,
        logprobs=4,
        prompt_logprobs=2,
        structured_outputs={"regex": "a+"},
    )


def test_a_completion_is_the_call_that_grpc_makes() -> None:
    asked = parse_completion(every_field(), "label")
    message = pb.GenerateRequest(
        request_id="label",
        model="m",
        text="p",
        sampling=pb.SamplingParameters(
            temperature=0.5,
            top_k=7,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            repetition_penalty=1.5,
            presence_penalty=-1.5,
            frequency_penalty=0.75,
            logit_bias={3: 1.5, 7: -100},
            allowed_token_ids=[1, 2],
            banned_token_ids=[3],
            banned_words=["bad"],
        ),
        stop=pb.StopConditions(
            max_tokens=9, stop=["a", "b"], stop_token_ids=[5], ignore_eos=True, min_tokens=2, include_stop=True
        ),
        n=3,
        priority=-2,
        cache_salt="s",
        stream=True,
        top_logprobs=4,
        prompt_logprobs=True,
        structured_output=pb.StructuredOutput(regex="a+"),
    )
    assert asked.calls == (call_from_pb(message),)
    assert asked.stream


def test_a_chat_is_the_call_that_grpc_makes() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    body = chat(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            USER | {"name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "refusal": None,
                "annotations": [],
                "function_call": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "f"}},
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=3,
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=True,
        stream=False,
    )
    call = parse_chat(body, "label").calls[0]
    assert call.input == ChatInput(
        turns=(
            ChatTurn("system", "a\nb"),
            ChatTurn("user", "hi", "ann"),
            ChatTurn("assistant", None, tool_calls=(ToolCall("1", "f", "{}"),), reasoning="hm"),
            ChatTurn("tool", "x", tool_call_id="1"),
        ),
        add_generation_prompt=True,
        tools=(json.dumps(tool, ensure_ascii=False),),
        template_arguments='{"enable_thinking": false}',
        tool_mode=ToolMode.NAMED,
        tool_name="f",
    )
    assert (call.max_tokens, call.top_logprobs, call.prompt_logprobs, call.stream) == (5, 3, None, False)


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("text", [TextInput("text")]),
        (["a", "b"], [TextInput("a"), TextInput("b")]),
        ([1, 2], [TokenInput((1, 2))]),
        ([[1], [2, 3]], [TokenInput((1,)), TokenInput((2, 3))]),
    ],
)
def test_every_form_of_prompt(prompt: object, inputs: list[object]) -> None:
    calls = parse_completion(completion(prompt=prompt), "l").calls
    assert [call.input for call in calls] == inputs
    assert [call.request_id for call in calls] == (["l"] if len(calls) == 1 else ["l-0", "l-1"])


def test_defaults_are_those_of_openai_clients() -> None:
    call = parse_completion(completion(), "l").calls[0]
    assert (call.temperature, call.max_tokens, call.stream) == (1.0, DEFAULT_MAX_TOKENS, False)
    call = parse_chat(chat(), "l").calls[0]
    assert (call.temperature, call.max_tokens, call.stream) == (1.0, None, False)


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObjectOutput()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JsonSchemaOutput(json.dumps(SCHEMA, ensure_ascii=False)),
        ),
        ({"guided_json": SCHEMA}, JsonSchemaOutput(json.dumps(SCHEMA, ensure_ascii=False))),
        ({"guided_json": "{}"}, JsonSchemaOutput("{}")),
        ({"guided_regex": "a"}, RegexOutput("a")),
        ({"guided_choice": ["a", "b"]}, ChoiceOutput(("a", "b"))),
        ({"guided_grammar": "g"}, GrammarOutput("g")),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchemaOutput(json.dumps(SCHEMA, ensure_ascii=False))),
        ({"structured_outputs": {"json_object": True}}, JsonObjectOutput()),
        ({"structured_outputs": {"choice": ["a"]}}, ChoiceOutput(("a",))),
        ({"structured_outputs": {"grammar": "g"}}, GrammarOutput("g")),
    ],
)
def test_every_way_to_ask_for_structure(fields: dict[str, Any], output: object) -> None:
    assert parse_chat(chat(**fields), "l").calls[0].structured_output == output
    assert parse_completion(completion(**fields), "l").calls[0].structured_output == output


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_known_fields_that_are_not_served_are_refused_unless_they_ask_for_nothing(name: str) -> None:
    for value in (None, *NEUTRAL[name]):
        parse_completion(completion(**{name: value}), "l")
    with pytest.raises(NotServed) as refusal:
        parse_completion(completion(**{name: {"x": 1}}), "l")
    assert refusal.value.field == name


def test_harmless_fields_and_nulls_are_passed_over() -> None:
    plain = parse_chat(chat(), "l")
    assert parse_chat(chat(**dict.fromkeys(HARMLESS, "x")), "l") == plain
    assert parse_chat(chat(stop=None, temperature=None, top_k=None, tools=None), "l") == plain
    assert parse_chat(chat(top_k=-1, n=None), "l").calls[0].top_k == 0


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "prompt of another kind": ({"prompt": 5}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "mixed": ({"prompt": ["a", 1]}, "prompt"),
    "mixed lists": ({"prompt": [[1], "a"]}, "prompt"),
    "empty ids": ({"prompt": [[1], []]}, "prompt"),
    "truth as id": ({"prompt": [1, True]}, "prompt"),
    "negative id": ({"prompt": [-1]}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
    "text for a number": ({"temperature": "1"}, "temperature"),
    "truth for a number": ({"max_tokens": True}, "max_tokens"),
    "fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "negative": ({"max_tokens": -1}, "max_tokens"),
    "over 32 bits": ({"max_tokens": 2**32}, "max_tokens"),
    "over 64 bits": ({"seed": 2**64}, "seed"),
    "number for a truth": ({"stream": 1}, "stream"),
    "stop of numbers": ({"stop": [1]}, "stop[0]"),
    "bias without id": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "id twice": ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    "bias of text": ({"logit_bias": {"1": "1"}}, "logit_bias"),
    "two structures": ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    "format without schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "options without stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "best_of": ({"best_of": 2}, "best_of"),
    "misspelt": ({"temprature": 1}, "temprature"),
    "misspelt inside": ({"structured_outputs": {"rgx": "a"}}, "structured_outputs.rgx"),
    "odd name": ({"a b": 1}, "a b"),
    "special tokens": ({"add_special_tokens": False}, "add_special_tokens"),
}
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": None}, "messages"),
    "messages of text": ({"messages": "hi"}, "messages"),
    "message without role": ({"messages": [{"content": "x"}]}, "messages[0].role"),
    "content of number": ({"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    "part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    "arguments as object": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "unknown member": ({"messages": [USER | {"colour": "red"}]}, "messages[0].colour"),
    "too many turns": ({"messages": [USER] * 4097}, "messages"),
    "tools of text": ({"tools": ["f"]}, "tools[0]"),
    "unknown choice": ({"tool_choice": "always"}, "tool_choice"),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "two limits": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "reasoning effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
    "a prompt": ({"prompt": "x"}, "prompt"),
}


@pytest.mark.parametrize(("fields", "field"), BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS)
def test_bad_completions_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises((InvalidRequest, NotServed)) as refusal:
        parse_completion(completion(**fields), "l")
    assert refusal.value.field == field


@pytest.mark.parametrize(("fields", "field"), BAD_CHATS.values(), ids=BAD_CHATS)
def test_bad_chats_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises((InvalidRequest, NotServed)) as refusal:
        parse_chat(chat(**fields), "l")
    assert refusal.value.field == field


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "long name": ({"q" * 100_000: 1}, "q" * MAX_PATH_CHARS),
    "long name inside": ({"structured_outputs": {"q" * 100_000: 1}}, "structured_outputs." + "q" * 181),
    "long id": ({"logit_bias": {"q" * 100_000: 1}}, "logit_bias"),
    "many unknown": ({f"k{number}": 1 for number in range(5000)}, "k0"),
    "many texts": ({"stop": [1] * 5000}, "stop[0]"),
    "many ids": ({"stop_token_ids": ["a"] * 5000}, "stop_token_ids[0]"),
    "many biases": ({"logit_bias": {str(number): "a" for number in range(5000)}}, ""),
    "many inside": ({"stream_options": {f"k{number}": 1 for number in range(5000)}}, ""),
}


@pytest.mark.parametrize(("fields", "field"), HOSTILE.values(), ids=HOSTILE)
def test_bodies_made_to_cost_time_are_refused_in_few_words(fields: dict[str, Any], field: str) -> None:
    """A name of two megabytes held the event loop for minutes, while names like it were looked for."""
    with pytest.raises((InvalidRequest, NotServed)) as refusal:
        parse_completion(completion(**fields), "l")
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 500


def test_no_long_name_is_guessed_at() -> None:
    known = "q" * MAX_GUESSED_CHARS
    assert known in did_you_mean(known[1:], [known])
    assert did_you_mean(known + "q", [known]) == ""


VALUES: dict[str, Any] = {
    "temperature": 1000.0,
    "top_p": 2.0,
    "min_p": 1.5,
    "repetition_penalty": -1.0,
    "presence_penalty": 9.0,
    "frequency_penalty": 9.0,
    "logit_bias": {"1": 1000.0},
    "allowed_token_ids": [10**6],
    "banned_token_ids": [10**6],
    "bad_words": [""],
    "max_tokens": 0,
    "stop": [""],
    "stop_token_ids": [10**6],
    "n": 100,
    "priority": 1,
    "cache_salt": "s",
    "request_id": "x" * 200,
}
"""Values of the right type that no router serves."""


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("make", [(completion, parse_completion), (chat, parse_chat)], ids=["completion", "chat"])
def test_what_validation_refuses_has_the_clients_name(make: tuple[Any, Any], name: str) -> None:
    body, parser = make
    asked = parser(body(**{name: VALUES[name]}), "l")
    with pytest.raises(PdserveError) as refusal:
        validate(asked.calls[0], ServedModel("m", 1000, True, lambda word: frozenset({(1,)})))
    assert param_of(refusal.value.field, asked.names).partition("[")[0] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_language_has_the_clients_name(fields: dict[str, Any], param: str) -> None:
    """`guided_regex.regex` was told, which nobody had written."""
    asked = parse_completion(completion(**fields), "l")
    language = asked.calls[0].structured_output
    assert language is not None
    assert param_of(field_of(language), asked.names) == param
    assert param_of("structured_output.choice.texts[3]", asked.names) == f"{param}[3]"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"{} {}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": {"b": ["x\\udfff"]}}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b"{'a': 1}",
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(HttpFault) as refusal:
        parsed_object(raw)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")


def test_whole_characters_pass_however_they_are_written() -> None:
    assert parsed_object('{"a": "\\ud83d\\ude00 é"}'.encode()) == {"a": "😀 é"}


def test_every_field_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    served = {*CompletionFields.model_fields, *ChatFields.model_fields} - REFUSED
    assert [name for name in sorted(served | HARMLESS) if f"`{name}`" not in page.replace(".include_usage`", "`")] == []


def test_a_body_of_very_many_lists_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.5 MB of `[1],[1],…`, a dozen times at once, held the router's loop until it lost its nodes."""
    monkeypatch.setattr(json, "loads", None)
    for piece in ("[1]", "{}", '["}"]'):
        raw = f'{{"prompt": [{",".join([piece] * MAX_CONTAINERS)}]}}'.encode()
        with pytest.raises(HttpFault, match="lists and objects"):
            parsed_object(raw)


def test_brackets_inside_texts_are_no_lists() -> None:
    text = '{[\\"[{' * MAX_CONTAINERS
    assert parsed_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    assert parsed_object(json.dumps({"prompt": [[1]] * 1000}).encode()) == {"prompt": [[1]] * 1000}


def test_bodies_on_their_way_share_a_room_that_comes_back() -> None:
    room = BodyRoom(100)
    with room.taken() as first, room.taken() as second:
        first(100 * (MAX_UNDER_WAY - 1))
        second(100)
        with pytest.raises(HttpFault, match="come back later") as fault:
            second(1)
        assert fault.value.status == 503
    with room.taken() as take:
        take(100 * MAX_UNDER_WAY)
