"""Answers of `/v1/completions`: OpenAI's `text_completion`, with vLLM's additions."""

from collections.abc import Sequence

from pdserve.core.work import SampledToken
from pdserve.router.http.errors import JsonObject
from pdserve.router.http.shape import PromptView, TokenFormat, finish_of, number, prompt_text
from pdserve.router.instructions import Finish
from pdserve.router.output import PromptToken, Shown
from pdserve.router.request import ValidRequest


class CompletionShape:
    """The answer's form. `text_offset` counts characters of the texts of single tokens, from the start of the choice's text."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokens: TokenFormat) -> None:
        self._tokens, self._wishes = tokens, tokens.wishes
        self._offsets: dict[int, int] = {}

    def opening(self, index: int, prompt: PromptView) -> JsonObject | None:
        """Return the echo, and what was asked of the prompt."""
        if not (self._wishes.echo or prompt.scores or self._wishes.token_ids):
            return None
        choice = self._choice(index, self._echo(prompt), self._scores(index, self._echoed(prompt)))
        return choice | self._tokens.of_prompt(prompt) | ({"token_ids": []} if self._wishes.token_ids else {})

    def gained(self, index: int, shown: Shown) -> JsonObject:
        """Return new text and tokens."""
        return self._choice(index, shown.text, self._scores(index, shown.tokens)) | self._tokens.ids_of(shown)

    def ended(self, index: int, finish: Finish, request: ValidRequest) -> JsonObject:
        """Return the end."""
        reason, stop = finish_of(finish, request)
        return self._choice(index, "", None) | {"finish_reason": reason, "stop_reason": stop}

    def whole(self, index: int, shown: Shown, finish: Finish, prompt: PromptView) -> JsonObject:
        """Return the whole choice."""
        scores = self._scores(index, [*self._echoed(prompt), *shown.tokens])
        reason, stop = finish_of(finish, prompt.request)
        choice = self._choice(index, self._echo(prompt) + shown.text, scores)
        return (
            choice
            | {"finish_reason": reason, "stop_reason": stop}
            | self._tokens.of_prompt(prompt)
            | self._tokens.ids_of(shown)
        )

    def _choice(self, index: int, text: str, scores: JsonObject | None) -> JsonObject:
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": None, "stop_reason": None}

    def _echo(self, prompt: PromptView) -> str:
        return prompt_text(prompt, self._tokens.texts) if self._wishes.echo else ""

    def _echoed(self, prompt: PromptView) -> Sequence[PromptToken]:
        return prompt.scores if self._wishes.echo else ()

    def _scores(self, index: int, tokens: Sequence[SampledToken | PromptToken]) -> JsonObject | None:
        num_top = self._wishes.num_top
        if num_top is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._tokens.texts.text_of(token.token_id))
        self._offsets[index] = offset
        return {
            "tokens": [self._tokens.name(token.token_id) for token in tokens],
            "token_logprobs": [None if token.logprob is None else number(token.logprob) for token in tokens],
            "top_logprobs": [
                None
                if token.logprob is None
                else {self._tokens.name(one): number(its) for one, its in reversed(self._tokens.top(token, num_top))}
                for token in tokens
            ],
            "text_offset": offsets,
        }
