"""A client's request before and after validation. Values only; `validation` turns the first form into the second."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from pdserve.core.work import Sampling


@dataclass(frozen=True, slots=True)
class TextInput:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids, used as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An assistant's call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn of a conversation. `content` is None where the turn has none."""

    role: str
    content: str | None
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


class ToolMode(IntEnum):
    """Whether tools must be called; the values are those of the contract."""

    AUTO = 1
    NONE = 2
    REQUIRED = 3
    NAMED = 4


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, oldest turn first.

    `add_generation_prompt` opens the assistant's turn (None: unless the last message is continued); `tools` and
    `template_arguments` are JSON text; `tool_name` goes with `ToolMode.NAMED`.
    """

    turns: tuple[ChatTurn, ...]
    add_generation_prompt: bool | None = None
    tools: tuple[str, ...] = ()
    continue_final_message: bool = False
    template_arguments: str = ""
    tool_mode: ToolMode = ToolMode.AUTO
    tool_name: str = ""
    parse_output: bool | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool offered to the model: its name, the JSON Schema of its arguments, and its whole definition, as parsed JSON."""

    name: str
    parameters: Mapping[str, object]
    definition: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ValidChat:
    """A conversation that was checked. `tools` are those of the request; `shown_tools` those that the model is shown.

    `opens_turn` and `continues_turn` say how the prompt ends; at most one of them is true.
    """

    turns: tuple[ChatTurn, ...]
    tools: tuple[Tool, ...] = ()
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    opens_turn: bool = True
    continues_turn: bool = False
    tool_mode: ToolMode = ToolMode.AUTO
    tool_name: str = ""
    parse_output: bool | None = None

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Tools that the model is shown and may call."""
        return () if self.tool_mode is ToolMode.NONE else self.tools


PromptInput = TextInput | TokenInput | ChatInput
ValidInput = TextInput | TokenInput | ValidChat


@dataclass(frozen=True, slots=True)
class JsonSchemaOutput:
    """The answer is JSON that this schema, as JSON text, accepts."""

    schema: str


@dataclass(frozen=True, slots=True)
class JsonObjectOutput:
    """The answer is any JSON object."""


@dataclass(frozen=True, slots=True)
class RegexOutput:
    """The whole answer matches this regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """The answer is one of these texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """The answer belongs to this grammar, in Lark's or GBNF's notation."""

    grammar: str


StructuredOutput = JsonSchemaOutput | JsonObjectOutput | RegexOutput | ChoiceOutput | GrammarOutput


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request as it was sent: None means that a field was not set. The fields are those of the contract."""

    request_id: str = ""
    model: str = ""
    input: PromptInput | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    banned_words: tuple[str, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop: bool | None = None
    n: int | None = None
    priority: int | None = None
    has_objectives: bool = False
    cache_salt: str | None = None
    stream: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool | None = None
    structured_output: StructuredOutput | None = None
    unknown_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that was checked once; nothing behind the door checks it again. `max_tokens` None: as many as fit."""

    label: str
    model: str
    input: ValidInput
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    stream: bool = True
    n: int = 1
    min_tokens: int = 0
    include_stop: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
