"""`POST /v1/chat/completions`: from its body to a call."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pdserve.core.errors import InvalidRequest
from pdserve.router.http.errors import JsonObject
from pdserve.router.http.fields import Asked, SamplingFields, Strict, Uint32, Wishes, parse, scored
from pdserve.router.pb import MAX_TURNS
from pdserve.router.request import ChatInput, ChatTurn, ToolCall, ToolMode

CHAT_PARAMS: Mapping[str, str] = {
    "input": "messages",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.tool_choice.name": "tool_choice.function.name",
    "chat.template_arguments": "chat_template_kwargs",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.continue_final_message": "continue_final_message",
    "top_logprobs": "top_logprobs",
}
"""What clients of this path call the contract's fields."""
TOOL_MODES: Mapping[str, ToolMode] = {
    "auto": ToolMode.AUTO,
    "none": ToolMode.NONE,
    "required": ToolMode.REQUIRED,
}


def text_of(content: object) -> object:
    """Return a content's text; its parts, if it has several, stand on lines of their own, as vLLM has them."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"a part of type {str(kind)[:64]!r} is not served; text parts are")
        if not isinstance(text, str):
            raise ValueError("a text part without text")  # noqa: TRY004 - pydantic expects it
        texts.append(text)
    return "\n".join(texts)


def without_nulls(given: object) -> object:
    """Return an object without the members that are null: clients send answers back with all members that they know."""
    if isinstance(given, dict):
        return {name: value for name, value in given.items() if value is not None}
    return given


class FunctionFields(Strict):
    """A function that was called."""

    name: str
    arguments: str


class ToolCallFields(Strict):
    """A call of a tool, as the assistant's message has it."""

    function: FunctionFields
    id: str = ""
    type: Literal["function"] = "function"
    index: int = 0


class MessageFields(Strict):
    """A message. `refusal` and `annotations` come back with answers of OpenAI's, and say nothing to a model."""

    role: str
    content: Annotated[str | None, BeforeValidator(text_of)] = None
    name: str = ""
    tool_calls: list[Annotated[ToolCallFields, BeforeValidator(without_nulls)]] = Field([])
    tool_call_id: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    refusal: str = ""
    annotations: list[object] = Field([])

    def turn(self) -> ChatTurn:
        """Return the turn that it is."""
        return ChatTurn(
            self.role,
            self.content,
            self.name,
            tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls),
            self.tool_call_id,
            self.reasoning_content or self.reasoning,
        )


class FunctionName(Strict):
    """Which function."""

    name: str


class NamedTool(Strict):
    """OpenAI's `tool_choice` of one tool."""

    function: FunctionName
    type: Literal["function"] = "function"


class TemplateFields(Strict):
    """What shapes the prompt of a conversation."""

    messages: list[Annotated[MessageFields, BeforeValidator(without_nulls)]] = Field(max_length=MAX_TURNS)
    tools: list[JsonObject] = Field([])
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject = Field({})
    add_special_tokens: Literal[False] = False

    def chat(self) -> ChatInput:
        """Return the conversation."""
        return ChatInput(
            turns=tuple(message.turn() for message in self.messages),
            add_generation_prompt=self.add_generation_prompt,
            tools=tuple(json.dumps(tool, ensure_ascii=False) for tool in self.tools),
            continue_final_message=self.continue_final_message,
            template_arguments=json.dumps(self.chat_template_kwargs) if self.chat_template_kwargs else "",
        )


class ChatFields(TemplateFields, SamplingFields):
    """The fields of this path."""

    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    logprobs: bool = False
    top_logprobs: Uint32 | None = None
    max_completion_tokens: Uint32 | None = None
    echo: Literal[False] = False

    def conversation(self) -> ChatInput:
        """Return the conversation with the choice of tools."""
        if isinstance(self.tool_choice, NamedTool):
            return replace(self.chat(), tool_mode=ToolMode.NAMED, tool_name=self.tool_choice.function.name)
        return replace(self.chat(), tool_mode=TOOL_MODES[self.tool_choice])


def parse_chat(body: JsonObject, label: str) -> Asked:
    """Return what the body asks for. Raises InvalidRequest or NotServed, naming the field."""
    fields = parse(ChatFields, body)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequest(
            "top_logprobs is given without logprobs", hint="set logprobs to true", field="top_logprobs"
        )
    both = (fields.max_tokens, fields.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ", hint="give one", field="max_completion_tokens"
        )
    wishes = Wishes(
        num_top=(fields.top_logprobs or 0) if fields.logprobs else None,
        num_prompt_top=fields.prompt_logprobs,
        token_ids=fields.return_token_ids,
        tokens_as_ids=fields.return_tokens_as_token_ids,
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
    )
    call = scored(fields.call(fields.request_id or label), wishes)
    call = replace(
        call, input=fields.conversation(), max_tokens=both[0] if fields.max_completion_tokens is None else both[1]
    )
    names = {**fields.names(), **CHAT_PARAMS}
    if fields.max_completion_tokens is not None:
        names["stop.max_tokens"] = "max_completion_tokens"
    return Asked((call,), wishes, fields.stream, call.request_id, names)
