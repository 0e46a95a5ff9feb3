"""A client's request before and after validation. Values only; `validation` turns the first form into the second."""

from dataclasses import dataclass, field

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
class ChatTurn:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, oldest turn first. `add_generation_prompt` opens the assistant's turn."""

    turns: tuple[ChatTurn, ...]
    add_generation_prompt: bool = True


PromptInput = TextInput | TokenInput | ChatInput


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A request as it was sent: None means that a field was not set. The fields are those of the contract."""

    request_id: str = ""
    model: str = ""
    input: PromptInput | None = None
    tools: tuple[str, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
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
    unknown_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that was checked once; nothing behind the door checks it again. `max_tokens` None: as many as fit."""

    label: str
    model: str
    input: PromptInput
    sampling: Sampling
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    ignore_eos: bool = False
    stream: bool = True
