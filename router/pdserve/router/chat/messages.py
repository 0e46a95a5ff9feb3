"""A conversation in the form that chat templates expect (Hugging Face's, which is OpenAI's with parsed arguments)."""

from pdserve.core.errors import InvalidRequest
from pdserve.router.chat.json_text import BadJson, parse_object
from pdserve.router.request import ChatTurn, ToolCall


def template_messages(turns: tuple[ChatTurn, ...]) -> list[dict[str, object]]:
    """Return the turns as messages, without what they lack. Raises InvalidRequest if a call's arguments are no JSON."""
    return [_message(turn, f"chat.messages[{index}]") for index, turn in enumerate(turns)]


def _message(turn: ChatTurn, field: str) -> dict[str, object]:
    message: dict[str, object] = {"role": turn.role}
    if turn.content is not None:
        message["content"] = turn.content
    if turn.name:
        message["name"] = turn.name
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(turn.tool_calls)]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _call(call: ToolCall, field: str) -> dict[str, object]:
    try:
        arguments = parse_object(call.arguments) if call.arguments.strip() else {}
    except BadJson as error:
        raise InvalidRequest(
            f"the arguments of the call cannot be read: {error}",
            hint="give them as a JSON object",
            field=f"{field}.arguments",
        ) from None
    form: dict[str, object] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id} | form if call.id else form
