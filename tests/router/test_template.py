"""Prompts from conversations: transformers' own apply_chat_template is the oracle; what cannot be rendered is named."""

import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pdserve.core.errors import InvalidRequest, ModelUnavailable
from pdserve.router.chat.door import checked_chat
from pdserve.router.request import ChatInput, ChatTurn, ToolCall, ToolMode
from pdserve.router.template import ChatTemplate, load_template
from pdserve.router.tokenizer import ChatSettings, load_text_model
from tests.router.chat_templates import CHATML, EXAMPLE, HERMES, TEMPLATES, THINKING
from tests.router.models import SPECIALS, byte_level_tokenizer, write_model_folder

TOKENS = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TOOLS = (json.dumps(WEATHER),)
CALL = ToolCall("abcDEF123", "get_weather", '{"city": "Zürich", "days": [1, 2]}')
USER, ASSISTANT = ChatTurn("user", "hi there"), ChatTurn("assistant", "Hello, ")
CALLED = (
    ChatTurn("user", "weather?"),
    ChatTurn("assistant", None, tool_calls=(CALL,)),
    ChatTurn("tool", '{"t": 20}', name="get_weather", tool_call_id="abcDEF123"),
    ChatTurn("user", "and now?"),
)
CHATS = {
    "user": ChatInput((USER,)),
    "system": ChatInput((ChatTurn("system", " be kind "), USER, ASSISTANT, USER)),
    "closed": ChatInput((USER, ASSISTANT), add_generation_prompt=False),
    "continued": ChatInput((USER, ASSISTANT), continue_final_message=True),
    "continued, nothing yet": ChatInput((USER, ChatTurn("assistant", "")), continue_final_message=True),
    "continued, white space": ChatInput((USER, ChatTurn("assistant", "Yes \n ")), continue_final_message=True),
    "tools": ChatInput((USER,), tools=TOOLS),
    "tools called": ChatInput(CALLED, tools=TOOLS),
    "arguments": ChatInput((USER,), template_arguments='{"enable_thinking": false, "date_string": "today"}'),
    "reasoning": ChatInput((USER, ChatTurn("assistant", "so", reasoning="why"), USER)),
    "empty": ChatInput((ChatTurn("user", ""),)),
    "unicode": ChatInput((ChatTurn("user", "naïve 日本 <|im_end|> {{ 7 }}"),)),
}


@cache
def tokenizer() -> Any:
    made: Any = PreTrainedTokenizerFast  # its constructor is untyped
    return made(tokenizer_object=byte_level_tokenizer(), **TOKENS)


def oracle(template: str, chat: ChatInput) -> str:
    """What transformers makes of it, from messages as its users write them."""
    messages: list[dict[str, object]] = []
    for turn in chat.turns:
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in turn.tool_calls
        ]
        given: dict[str, object] = {
            "role": turn.role,
            "content": turn.content,
            "name": turn.name or None,
            "tool_calls": calls or None,
            "tool_call_id": turn.tool_call_id or None,
            "reasoning_content": turn.reasoning or None,
        }
        messages.append(given)
    return str(
        tokenizer().apply_chat_template(
            messages,
            tools=[json.loads(tool) for tool in chat.tools] or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=chat.add_generation_prompt is not False and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            **json.loads(chat.template_arguments or "{}"),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_prompts_are_those_of_transformers(name: str, chat: ChatInput) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    try:
        expected = oracle(TEMPLATES[name], chat)
    except Exception:  # noqa: BLE001 - what transformers raises is many things; we must refuse as well
        with pytest.raises(InvalidRequest):
            template.render(checked_chat(chat))
        return
    if chat.tools and name in ("chatml", "thinking"):
        with pytest.raises(InvalidRequest, match="shows the model no tools") as caught:
            template.render(checked_chat(chat))
        assert caught.value.field == "chat.tools"
        return
    assert template.render(checked_chat(chat)) == expected


def test_enough_of_the_table_is_rendered() -> None:
    """Guards the test above: it must not pass because transformers refuses everything."""
    pairs = [(source, chat) for source in TEMPLATES.values() for chat in CHATS.values()]
    assert sum(is_rendered(source, chat) for source, chat in pairs) > 45
    for template in (HERMES, EXAMPLE):
        shown = oracle(template, CHATS["tools called"])
        assert (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>'
            in shown
        )


def is_rendered(template: str, chat: ChatInput) -> bool:
    try:
        oracle(template, chat)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


ODD = ("", " ", "{{ x }}", "{% if %}", "<|im_end|>", "<think>a</think>b", "CONTINUE_FINAL_MESSAGE_TAG ")
words = st.text(max_size=12) | st.sampled_from(ODD)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(words, values, max_size=3).map(json.dumps)
call_ids, names = st.sampled_from(["", "abcDEF123"]), st.sampled_from(["f", "get_weather"])
calls = st.lists(st.builds(ToolCall, call_ids, names, objects), max_size=2)
assistants = st.builds(
    lambda content, reasoning, called: ChatTurn("assistant", content, reasoning=reasoning, tool_calls=tuple(called)),
    st.none() | words,
    words,
    calls,
)
others = st.builds(ChatTurn, st.sampled_from(["system", "user", "tool", "poet"]), words, st.sampled_from(["", "name"]))
VARIABLES = ("enable_thinking", "date_string", "custom_tools", "documents", "range", "x")
arguments = st.dictionaries(st.sampled_from(VARIABLES), values, max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> ChatInput:
    turns = draw(st.lists(assistants | others, min_size=1, max_size=5))
    return ChatInput(
        tuple(turns),
        add_generation_prompt=draw(st.none() | st.booleans()),
        tools=TOOLS if draw(st.booleans()) else (),
        continue_final_message=draw(st.booleans()),
        template_arguments=json.dumps(draw(arguments)),
    )


@pytest.mark.parametrize("name", TEMPLATES)
@given(chat=conversations())
@settings(max_examples=150, deadline=None)
def test_any_conversation_is_rendered_as_transformers_does_or_refused_by_name(name: str, chat: ChatInput) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    try:
        rendered = template.render(checked_chat(chat))
    except InvalidRequest as error:
        assert (error.field or "").startswith("chat.")
    else:
        assert rendered == oracle(TEMPLATES[name], chat)


def test_hidden_tools_are_not_rendered() -> None:
    chat = ChatInput((USER,), tools=TOOLS, tool_mode=ToolMode.NONE)
    for template in (HERMES, CHATML):
        assert ChatTemplate(template, TOKENS).render(checked_chat(chat)) == oracle(template, ChatInput((USER,)))


def test_a_template_that_shows_tools_in_some_turns_only_is_not_refused_in_the_others() -> None:
    """A conversation with tools must not break at the turn whose prompt does not show them."""
    shows_first = "{% if messages | length == 1 %}{{ tools }}{% endif %}{{ messages[-1].content }}"
    chat = checked_chat(ChatInput((USER, ASSISTANT, USER), tools=TOOLS))
    assert ChatTemplate(shows_first, TOKENS).render(chat) == "hi there"
    shows_later = "{% if messages | length > 1 %}{{ tools }}{% endif %}{{ messages[-1].content }}"
    template = ChatTemplate(shows_later, TOKENS)
    assert "get_weather" in template.render(chat)
    assert template.render(checked_chat(ChatInput((USER,), tools=TOOLS))) == "hi there"


def turn(role: str = "user", content: str | None = "x", **rest: Any) -> ChatTurn:
    return ChatTurn(role, content, **rest)


def tool(**function: object) -> str:
    return json.dumps({"type": "function", "function": function})


BAD = [
    ("messages", ChatInput(())),
    ("messages[0].role", ChatInput((turn(role=""),))),
    ("messages[1].content", ChatInput((USER, turn(content=None)))),
    ("messages[0].tool_calls", ChatInput((turn(tool_calls=(CALL,)),))),
    ("messages[0].reasoning", ChatInput((turn(reasoning="r"),))),
    ("messages[0].tool_call_id", ChatInput((turn(tool_call_id="r"),))),
    ("messages[0].tool_calls[0].name", ChatInput((turn("assistant", tool_calls=(ToolCall("", "", "{}"),)),))),
    ("continue_final_message", ChatInput((USER,), continue_final_message=True)),
    ("continue_final_message", ChatInput((USER, turn("assistant", None)), continue_final_message=True)),
    ("continue_final_message", ChatInput((USER, ASSISTANT), add_generation_prompt=True, continue_final_message=True)),
    ("tools[0]", ChatInput((USER,), tools=("{",))),
    ("tools[0]", ChatInput((USER,), tools=("[]",))),
    ("tools[0]", ChatInput((USER,), tools=('{"type": "function", "function": {"name": "a", "x": NaN}}',))),
    ("tools[0]", ChatInput((USER,), tools=('{"a":' * 40_000,))),
    ("tools[0]", ChatInput((USER,), tools=('{"type": "web_search"}',))),
    ("tools[1].function.name", ChatInput((USER,), tools=(*TOOLS, tool()))),
    ("tools[0].function.name", ChatInput((USER,), tools=(tool(name="a b"),))),
    ("tools[0].function.name", ChatInput((USER,), tools=(tool(name=7),))),
    ("tools[0].function.parameters", ChatInput((USER,), tools=(tool(name="a", parameters=[]),))),
    ("tools[1]", ChatInput((USER,), tools=TOOLS * 2)),
    ("tools", ChatInput((USER,), tools=tuple(tool(name=f"f{i}") for i in range(129)))),
    ("tools", ChatInput((USER,), tools=(tool(name="f", description="d" * 300_000),))),
    ("tool_choice", ChatInput((USER,), tool_mode=ToolMode.REQUIRED)),
    ("tool_choice.name", ChatInput((USER,), tools=TOOLS, tool_mode=ToolMode.NAMED, tool_name="other")),
    ("tool_choice.name", ChatInput((USER,), tools=TOOLS, tool_name="get_weather")),
    ("tool_choice", ChatInput((USER, ASSISTANT), False, TOOLS, True, tool_mode=ToolMode.REQUIRED)),
    ("template_arguments", ChatInput((USER,), template_arguments="{")),
    ("template_arguments", ChatInput((USER,), template_arguments="[1]")),
    ("template_arguments", ChatInput((USER,), template_arguments='{"messages": []}')),
    ("template_arguments", ChatInput((USER,), template_arguments='{"add_generation_prompt": false}')),
    ("template_arguments", ChatInput((USER,), template_arguments='{"bos_token": "x"}')),
    ("template_arguments", ChatInput((USER,), template_arguments='{"chat_template": "x"}')),
    ("template_arguments", ChatInput((USER,), template_arguments=json.dumps({"a": "x" * 70_000}))),
    ("parse_output", ChatInput((USER,), tools=TOOLS, parse_output=True)),
]


@pytest.mark.parametrize(("field", "chat"), BAD)
def test_bad_conversations_are_refused_at_the_door_by_field(field: str, chat: ChatInput) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_chat(chat)
    assert caught.value.field == f"chat.{field}"
    assert caught.value.hint


@pytest.mark.parametrize("arguments", ["{", "[1]", '"a"', "NaN", '{"a":' * 100_000, '{"a": Infinity}'])
def test_arguments_of_earlier_calls_that_are_no_json_object_are_named(arguments: str) -> None:
    turns = (USER, turn("assistant", None, tool_calls=(CALL, ToolCall("b", "f", arguments))))
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(HERMES, TOKENS).render(checked_chat(ChatInput(turns)))
    assert caught.value.field == "chat.messages[1].tool_calls[1].arguments"


def test_what_a_turn_does_not_have_is_no_variable_of_its_message() -> None:
    """Templates ask `is defined`; a None would be written as such."""
    source = "{{ messages[1] | tojson }}"
    turns = (USER, turn("assistant", None, tool_calls=(CALL,)))
    rendered = ChatTemplate(source, TOKENS).render(checked_chat(ChatInput(turns)))
    assert sorted(json.loads(rendered)) == ["role", "tool_calls"]


def test_half_a_surrogate_pair_is_refused() -> None:
    chat = ChatInput((USER,), tools=(tool(name="f", description="\ud800"),))
    with pytest.raises(InvalidRequest, match="surrogate"):
        ChatTemplate(HERMES, TOKENS).render(checked_chat(chat))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% for i in range(99999) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    seconds = count(step=0.001)
    template = ChatTemplate(source, TOKENS, now_s=lambda: next(seconds))
    with pytest.raises(InvalidRequest, match=r"longer than 5 s|recursion|nested too deeply"):
        template.render(checked_chat(ChatInput((USER,))))


def test_a_prompt_that_a_template_blows_up_is_refused() -> None:
    template = ChatTemplate("{{ 'x' * 9000000 }}", TOKENS)
    with pytest.raises(InvalidRequest, match="9000000 characters"):
        template.render(checked_chat(ChatInput((USER,))))


def test_a_refusal_does_not_repeat_the_conversation() -> None:
    source = "{{ raise_exception(messages[0].content) }}"
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, TOKENS).render(checked_chat(ChatInput((turn(content="long " * 10_000),))))
    assert len(str(caught.value)) < 600


def test_templates_for_tools_and_templates_of_the_operator(tmp_path: Path) -> None:
    chat, tools = checked_chat(ChatInput((USER,))), checked_chat(ChatInput((USER,), tools=TOOLS))
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}"}]
    folder = write_model_folder(tmp_path / "named", template=None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    folder2 = write_model_folder(tmp_path / "file", template="plain")
    (folder2 / "additional_chat_templates").mkdir()
    (folder2 / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}", encoding="utf-8")
    for template in (load_template(folder), load_template(folder2)):
        assert template is not None
        assert template.render(chat) == "plain"
        assert "get_weather" in template.render(tools)
    own = tmp_path / "own.jinja"
    own.write_text(THINKING, encoding="utf-8")
    model = load_text_model(str(folder), ChatSettings(template=own))
    assert model.template is not None
    assert model.template.source == THINKING
    with pytest.raises(ModelUnavailable, match=r"none\.jinja"):
        load_text_model(str(folder), ChatSettings(template=tmp_path / "none.jinja"))
