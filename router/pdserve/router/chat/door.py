"""What a conversation may say, checked once: the turns, the tools and how they are chosen, and the template's variables.

Only what costs little is done here, on the event loop; the arguments of earlier calls are parsed when the prompt is rendered
(`messages`).
"""

import re
from typing import NoReturn

from pdserve.core.errors import InvalidRequest
from pdserve.router.chat.json_text import BadJson, parse_object
from pdserve.router.request import ChatInput, ChatTurn, Tool, ToolMode, ValidChat

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 256 * 1024
MAX_ARGUMENTS_CHARS = 64 * 1024
TOOL_NAME = re.compile(r"[\w.:/-]{1,64}", re.ASCII)
OTHERS = frozenset({"system", "developer", "user", "tool"})
"""Roles that are surely not the assistant's; templates may know more."""
RESERVED = frozenset(
    {
        *("messages", "conversations", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "return_assistant_tokens_mask"),
    }
)
"""Variables that the request itself sets, and parameters of the renderer."""


def checked_chat(chat: ChatInput, tool_format: str | None = None) -> ValidChat:
    """Return the conversation's valid form. Raises InvalidRequest naming the field.

    `tool_format` is the format in which the model calls tools, None if the router does not know it.
    """
    if not chat.turns:
        _refuse("messages", "the conversation is empty", "give at least one message")
    for index, turn in enumerate(chat.turns):
        _check_turn(turn, f"messages[{index}]")
    if chat.continue_final_message:
        _check_continued(chat)
    tools = _checked_tools(chat.tools)
    _check_choice(chat, tools)
    if chat.parse_output and tools and tool_format is None and chat.tool_mode is ToolMode.AUTO:
        _refuse("parse_output", "the format of this model's tool calls is not known", "set the router's --tool-format")
    return ValidChat(
        turns=chat.turns,
        tools=tools,
        template_arguments=_checked_arguments(chat.template_arguments),
        opens_turn=not chat.continue_final_message and chat.add_generation_prompt is not False,
        continues_turn=chat.continue_final_message,
        tool_mode=chat.tool_mode,
        tool_name=chat.tool_name,
        parse_output=chat.parse_output,
    )


def conversation_chars(chat: ChatInput | ValidChat) -> int:
    """Return how many characters the conversation has, without what the template adds."""
    texts = (text for turn in chat.turns for text in (turn.content or "", turn.reasoning))
    calls = (text for turn in chat.turns for call in turn.tool_calls for text in (call.name, call.arguments))
    return sum(map(len, texts)) + sum(map(len, calls))


def _check_turn(turn: ChatTurn, field: str) -> None:
    if not turn.role:
        _refuse(f"{field}.role", "the role is empty", "for example: user")
    if turn.role in OTHERS:
        if turn.content is None:
            _refuse(f"{field}.content", f"a turn of {turn.role} has no content", "set it; it may be empty")
        if turn.tool_calls:
            _refuse(f"{field}.tool_calls", f"a turn of {turn.role} calls tools", "only an assistant's turn may")
        if turn.reasoning:
            _refuse(f"{field}.reasoning", f"a turn of {turn.role} has reasoning", "only an assistant's turn may")
    if turn.tool_call_id and turn.role != "tool":
        _refuse(f"{field}.tool_call_id", f"a turn of {turn.role} answers a call", "only a tool's turn may")
    for index, call in enumerate(turn.tool_calls):
        if not call.name:
            _refuse(f"{field}.tool_calls[{index}].name", "the call names no tool", "give the tool's name")


def _check_continued(chat: ChatInput) -> None:
    if chat.add_generation_prompt:
        _refuse(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other",
            "leave add_generation_prompt unset to continue the last message",
        )
    last = chat.turns[-1]
    if last.role in OTHERS:
        _refuse("continue_final_message", f"the last message is of {last.role}", "only an assistant's can be continued")
    if last.content is None:
        _refuse("continue_final_message", "the last message has no content to continue", "give it content")


def _checked_tools(texts: tuple[str, ...]) -> tuple[Tool, ...]:
    if len(texts) > MAX_TOOLS:
        _refuse("tools", f"{len(texts)} tools", f"at most {MAX_TOOLS}")
    if (num := sum(map(len, texts))) > MAX_TOOLS_CHARS:
        _refuse("tools", f"the tools have {num} characters", f"at most {MAX_TOOLS_CHARS}")
    tools: dict[str, Tool] = {}
    for index, text in enumerate(texts):
        tool = _checked_tool(text, f"tools[{index}]")
        if tool.name in tools:
            _refuse(f"tools[{index}]", f"the tool {tool.name} is given twice", "names must differ")
        tools[tool.name] = tool
    return tuple(tools.values())


def _checked_tool(text: str, field: str) -> Tool:
    form = 'for example: {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
    try:
        definition = parse_object(text)
    except BadJson as error:
        _refuse(field, f"the tool cannot be read: {error}", form)
    function = definition.get("function")
    if definition.get("type", "function") != "function" or not isinstance(function, dict):
        _refuse(field, "the tool is no function", form)
    name, parameters = function.get("name"), function.get("parameters", {})
    if not isinstance(name, str) or TOOL_NAME.fullmatch(name) is None:
        _refuse(f"{field}.function.name", "the tool has no usable name", "1 to 64 letters, digits and _ - . : /")
    if not isinstance(parameters, dict):
        _refuse(f"{field}.function.parameters", "the parameters are no JSON object", "give a JSON Schema, or none")
    return Tool(name, parameters, definition)


def _check_choice(chat: ChatInput, tools: tuple[Tool, ...]) -> None:
    must_call = chat.tool_mode in (ToolMode.REQUIRED, ToolMode.NAMED)
    if must_call and not tools:
        _refuse("tool_choice", "a tool must be called, and none is given", "give tools, or another tool_choice")
    if must_call and (chat.continue_final_message or chat.add_generation_prompt is False):
        _refuse("tool_choice", "a call that must be made opens the assistant's turn", "leave the turn to the router")
    if chat.tool_mode is ToolMode.NAMED:
        names = [tool.name for tool in tools]
        if chat.tool_name not in names:
            _refuse(
                "tool_choice.name", f"there is no tool {chat.tool_name[:64]!r}", f"one of: {', '.join(names)}"[:300]
            )
    elif chat.tool_name:
        _refuse("tool_choice.name", "a name goes with mode NAMED only", "set the mode, or leave the name empty")


def _checked_arguments(text: str) -> dict[str, object]:
    if not text:
        return {}
    if len(text) > MAX_ARGUMENTS_CHARS:
        _refuse("template_arguments", f"they have {len(text)} characters", f"at most {MAX_ARGUMENTS_CHARS}")
    try:
        given = parse_object(text)
    except BadJson as error:
        _refuse("template_arguments", f"they cannot be read: {error}", 'a JSON object: {"enable_thinking": false}')
    for name in given:
        if name in RESERVED or name.endswith("_token"):
            _refuse(
                "template_arguments",
                f"{name[:64]} may not be set here",
                "the request's own fields and the model set it",
            )
    return given


def _refuse(field: str, message: str, hint: str) -> NoReturn:
    raise InvalidRequest(message, hint=hint, field=f"chat.{field}")
