"""What both forms of an answer share: the choices' common members, usage, and log-probabilities as JSON numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.work import FinishReason, SampledToken, TopLogprobs
from pdserve.router.http.errors import JsonObject
from pdserve.router.http.fields import Wishes
from pdserve.router.http.token_texts import TokenTexts
from pdserve.router.instructions import Answer, Finish
from pdserve.router.output import PromptToken, Shown
from pdserve.router.request import TextInput, ValidRequest

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class PromptView:
    """The prompt of a choice, as far as answers show it."""

    request: ValidRequest
    ids: tuple[int, ...]
    scores: Sequence[PromptToken] = ()


class Shape(Protocol):
    """The form of one answer. Choices are numbered over all prompts; a shape remembers what it has said of each."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int, prompt: PromptView) -> JsonObject | None:
        """Return the first chunk's choice, if there is something to say before the answer."""
        ...

    def gained(self, index: int, shown: Shown) -> JsonObject:
        """Return the choice of a chunk that adds something."""
        ...

    def ended(self, index: int, finish: Finish, request: ValidRequest) -> JsonObject:
        """Return the choice of a chunk that ends it."""
        ...

    def whole(self, index: int, shown: Shown, finish: Finish, prompt: PromptView) -> JsonObject:
        """Return a complete choice."""
        ...


class TokenFormat:
    """What both forms say of tokens: ids, likely ones, and names, which are their text or `token_id:ID`."""

    def __init__(self, texts: TokenTexts, wishes: Wishes) -> None:
        self.texts, self.wishes = texts, wishes

    def name(self, token_id: int) -> str:
        """Return the token's name."""
        return f"token_id:{token_id}" if self.wishes.tokens_as_ids else self.texts.text_of(token_id)

    def top(self, token: SampledToken | PromptToken, num_top: int) -> TopLogprobs:
        """Return the likeliest tokens, best first, and the token itself if it is not among them."""
        found = token.top[:num_top]
        if token.logprob is None or any(token_id == token.token_id for token_id, _ in found):
            return found
        return (*found, (token.token_id, token.logprob))

    def of_prompt(self, prompt: PromptView) -> JsonObject:
        """Return a choice's members that tell of the prompt, as far as they were asked for."""
        found: JsonObject = {}
        if self.wishes.num_prompt_top is not None:
            found["prompt_logprobs"] = self.prompt_logprobs(prompt.scores)
        if self.wishes.token_ids:
            found["prompt_token_ids"] = list(prompt.ids)
        return found

    def ids_of(self, shown: Shown) -> JsonObject:
        """Return a choice's member with the ids of its tokens, if they were asked for."""
        return {"token_ids": [token.token_id for token in shown.tokens]} if self.wishes.token_ids else {}

    def prompt_logprobs(self, scores: Sequence[PromptToken]) -> list[JsonObject | None]:
        """Return vLLM's `prompt_logprobs`: per token its likeliest ids, and itself; nothing for the first."""
        return [self._scored(token) for token in scores]

    def _scored(self, token: PromptToken) -> JsonObject | None:
        if token.logprob is None:
            return None
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, 1)}
        return {
            str(token_id): {
                "logprob": number(logprob),
                "rank": ranks.get(token_id),
                "decoded_token": self.name(token_id),
            }
            for token_id, logprob in self.top(token, self.wishes.num_prompt_top or 0)
        }


def number(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)


def finish_of(finish: Finish, request: ValidRequest) -> tuple[str, str | int | None]:
    """Return OpenAI's `finish_reason` and vLLM's `stop_reason`: the stop text, or the stop id that was asked for."""
    match finish.reason:
        case FinishReason.LENGTH:
            return "length", None
        case FinishReason.STOP_SEQUENCE:
            return "stop", finish.stop
        case FinishReason.STOP:
            is_asked = finish.stop_token_id in request.stop_token_ids
            return "stop", finish.stop_token_id if is_asked else None


def usage_of(answers: Iterable[Answer]) -> JsonObject:
    """Return the usage of a request, over all its prompts."""
    every = list(answers)
    num_prompt = sum(answer.num_prompt_tokens for answer in every)
    num_output = sum(answer.num_completion_tokens for answer in every)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached_tokens or 0 for answer in every)},
    }


def prompt_text(prompt: PromptView, texts: TokenTexts) -> str:
    """Return the prompt as it is echoed: as it was given, or the text of its ids."""
    given = prompt.request.input
    if isinstance(given, TextInput):
        return given.text
    return b"".join(texts.bytes_of(token_id) for token_id in prompt.ids).decode(errors="replace")
