"""What may be asked: a prompt in one of three forms, and how to continue it. None and empty mean unset: the router decides.

Ranges stand in `inference.proto`, and the router checks them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdserve.client.language import Language

JsonValue = str | Mapping[str, object]
"""A JSON object: as a mapping, or as JSON text that is sent as it is."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An assistant's call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool, which must be called."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool
"""Whether tools are called: as the model likes, never, at least one, or this one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; `role` as the model's template names it.

    `content` is None where a turn says nothing, e.g. an assistant's turn that only calls tools. `tool_call_id` is, in a tool's
    turn, the call that it answers.
    """

    role: str
    content: str | None
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest turn first.

    `tools` are objects as OpenAI's API has them: {"type": "function", "function": {"name", …}}. `template_arguments` are more
    variables for the template. `continue_final_message` goes on with the last turn, an assistant's. `parse_output` false leaves
    tool calls and reasoning in the text.
    """

    turns: tuple[Turn, ...]
    tools: tuple[JsonValue, ...] = ()
    tool_choice: ToolChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template_arguments: JsonValue = ""
    parse_output: bool | None = None


Prompt = str | tuple[int, ...] | Chat
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to continue a prompt. The fields are the contract's; `timeout_s` bounds the whole call, retries included."""

    model: str = ""
    request_id: str = ""
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    banned_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool | None = None
    structured_output: Language | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
