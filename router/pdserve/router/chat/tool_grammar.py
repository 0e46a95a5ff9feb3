"""An answer that must call a tool: the prompt opens the call in the model's own format, and a JSON schema binds what follows.

The answer is then one call in JSON, which ends it. The opening counts as prompt. A template that has opened the model's
reasoning has it closed first: an answer that must be a call has no room for it.
"""

import json
from collections.abc import Mapping

from pdserve.core.errors import InvalidRequest
from pdserve.core.work import Grammar, GrammarKind
from pdserve.router.request import Tool, ToolMode, ValidChat

OPENINGS = {"hermes": "<tool_call>\n", "mistral": "[TOOL_CALLS] ["}
"""What stands before the JSON of a call, by format; nothing where the answer itself is the JSON."""


def must_call(chat: ValidChat) -> bool:
    """Whether the answer must be a call."""
    return chat.tool_mode in (ToolMode.REQUIRED, ToolMode.NAMED)


def tool_grammar(chat: ValidChat, tool_format: str | None) -> Grammar | None:
    """Return the language of an answer that must call a tool, or None. Raises InvalidRequest if a schema nests too deeply."""
    if not must_call(chat):
        return None
    try:
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_answer_schema(chat, tool_format), ensure_ascii=False))
    except RecursionError:
        raise InvalidRequest(
            "the parameters of a tool are nested too deeply", hint="flatten them", field="chat.tools"
        ) from None


def _answer_schema(chat: ValidChat, tool_format: str | None) -> dict[str, object]:
    callable_tools = [tool for tool in chat.tools if chat.tool_mode is ToolMode.REQUIRED or tool.name == chat.tool_name]
    key = "parameters" if tool_format == "llama3" else "arguments"
    if len(callable_tools) == 1:
        return _call_schema(callable_tools[0], key, "#")
    return {"anyOf": [_call_schema(tool, key, f"#/anyOf/{i}") for i, tool in enumerate(callable_tools)]}


def _call_schema(tool: Tool, key: str, place: str) -> dict[str, object]:
    """Return the schema of a call of `tool`; its name comes first."""
    parameters = {"type": "object"} | _moved(tool.parameters, f"{place}/properties/{key}")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: parameters},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Mapping[str, object], place: str) -> dict[str, object]:
    """Return a schema that stands at `place` of a larger one: what it says about itself (`#…`) is said about there."""

    def moved(value: object, *, is_reference: bool = False) -> object:
        if is_reference and isinstance(value, str) and value.startswith("#"):
            return place + value[1:]
        if isinstance(value, Mapping):
            return {name: moved(item, is_reference=name == "$ref") for name, item in value.items()}
        return [moved(item) for item in value] if isinstance(value, list) else value

    return {name: moved(item, is_reference=name == "$ref") for name, item in schema.items()}
