"""What may be asked: a prompt in one of three forms, and how to continue it. None means unset: the router decides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation; `role` as the model's template names it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest turn first."""

    turns: tuple[Turn, ...]


Prompt = str | tuple[int, ...] | Chat
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to continue a prompt; the ranges stand in `inference.proto`, and the router checks them."""

    model: str = ""
    request_id: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    timeout_s: float | None = None
