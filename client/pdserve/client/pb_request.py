"""Requests to protobuf messages. A value that its field cannot hold raises InvalidRequest with the option's name."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pdserve.client.language import Grammar, JsonObject, JsonSchema, Language, OneOf, Regex
from pdserve.client.request import Chat, NamedTool, Options, Prompt, ToolChoice, Turn
from pdserve.core.errors import InvalidRequest
from pdserve.v1 import inference_pb2 as pb

REQUEST_FIELDS = ("n", "priority", "cache_salt", "top_logprobs", "prompt_logprobs")
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SAMPLING_LISTS = ("allowed_token_ids", "banned_token_ids", "banned_words")
STOP_FIELDS = ("max_tokens", "min_tokens", "ignore_eos", "include_stop")
STOP_LISTS = ("stop", "stop_token_ids")
TOOL_MODES = {
    "auto": pb.ToolChoice.MODE_AUTO,
    "none": pb.ToolChoice.MODE_NONE,
    "required": pb.ToolChoice.MODE_REQUIRED,
}
Settable = pb.GenerateRequest | pb.SamplingParameters | pb.StopConditions | pb.ChatInput


def request_to_pb(prompt: Prompt, options: Options, *, stream: bool) -> pb.GenerateRequest:
    """Return the message of a request. Raises InvalidRequest for a value that its field cannot hold, e.g. a negative count."""
    request = pb.GenerateRequest(request_id=options.request_id, model=options.model, stream=stream)
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Chat):
        request.chat.CopyFrom(chat_to_pb(prompt))
    else:
        with fits("token_ids"):
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    for message, names, lists in (
        (request, REQUEST_FIELDS, ()),
        (request.sampling, SAMPLING_FIELDS, SAMPLING_LISTS),
        (request.stop, STOP_FIELDS, STOP_LISTS),
    ):
        for name in names:
            _set(message, name, getattr(options, name))
        for name in lists:
            _extend(message, name, getattr(options, name))
    if options.logit_bias:
        with fits("logit_bias"):
            request.sampling.logit_bias.update(options.logit_bias)
    if options.structured_output is not None:
        with fits("structured_output"):
            request.structured_output.CopyFrom(_language_to_pb(options.structured_output))
    return request


def chat_to_pb(chat: Chat) -> pb.ChatInput:
    """Return the message of a conversation."""
    message = pb.ChatInput()
    for index, turn in enumerate(chat.turns):
        with fits(f"chat.messages[{index}]"):
            message.messages.append(_turn_to_pb(turn))
    for index, tool in enumerate(chat.tools):
        with fits(f"chat.tools[{index}]"):
            message.tools.append(_json_text(tool))
    with fits("chat.template_arguments"):
        message.template_arguments = _json_text(chat.template_arguments)
    for name in ("add_generation_prompt", "continue_final_message", "parse_output"):
        _set(message, name, getattr(chat, name))
    if chat.tool_choice is not None:
        with fits("chat.tool_choice"):
            message.tool_choice.CopyFrom(_tool_choice_to_pb(chat.tool_choice))
    return message


def tokenize_to_pb(prompt: str | Chat, model: str, add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """Return the message that asks for an input's tokens."""
    with fits("model"):
        request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(prompt, Chat):
        request.chat.CopyFrom(chat_to_pb(prompt))
    else:
        with fits("text"):
            request.text = prompt
    return request


def detokenize_to_pb(token_ids: tuple[int, ...], model: str, show_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """Return the message that asks for the text of tokens."""
    with fits("token_ids"):
        return pb.DetokenizeRequest(model=model, token_ids=token_ids, show_special_tokens=show_special_tokens)


def _turn_to_pb(turn: Turn) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=turn.role,
        content=turn.content,
        name=turn.name,
        tool_calls=[pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls],
        tool_call_id=turn.tool_call_id,
        reasoning=turn.reasoning,
    )


def _tool_choice_to_pb(choice: ToolChoice) -> pb.ToolChoice:
    if isinstance(choice, NamedTool):
        return pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name=choice.name)
    if choice not in TOOL_MODES:
        message = f"tool_choice {choice!r} is none of {', '.join(TOOL_MODES)}, nor a NamedTool"
        raise InvalidRequest(message, field="chat.tool_choice")
    return pb.ToolChoice(mode=TOOL_MODES[choice])


def _language_to_pb(language: Language) -> pb.StructuredOutput:
    match language:
        case JsonSchema(schema):
            return pb.StructuredOutput(json_schema=_json_text(schema))
        case JsonObject():
            return pb.StructuredOutput(json_object=True)
        case Regex(pattern):
            return pb.StructuredOutput(regex=pattern)
        case OneOf(texts):
            return pb.StructuredOutput(choice=pb.Choices(texts=texts))
        case Grammar(grammar):
            return pb.StructuredOutput(grammar=grammar)


@contextmanager
def fits(name: str) -> Iterator[None]:
    """Raise InvalidRequest with the field's name for a value that the field cannot hold."""
    try:
        yield
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{name} is not valid UTF-8", hint="half a surrogate pair is no text", field=name
        ) from None
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{name}: {error}", hint="see pdserve.client.Options", field=name) from None


def _json_text(value: str | Mapping[str, object]) -> str:
    """Return JSON text. Raises ValueError for what is none."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an object that is no JSON: {error}") from None


def _set(message: Settable, name: str, value: float | str | None) -> None:
    if value is not None:
        with fits(name):
            setattr(message, name, value)


def _extend(message: Settable, name: str, values: tuple[int, ...] | tuple[str, ...]) -> None:
    if values:
        with fits(name):
            getattr(message, name).extend(values)
