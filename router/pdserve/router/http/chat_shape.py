"""Answers of `/v1/chat/completions`: OpenAI's `chat.completion`, with vLLM's additions."""

from collections.abc import Sequence

from pdserve.core.work import SampledToken
from pdserve.router.chat.gains import ToolCallGain
from pdserve.router.http.errors import JsonObject
from pdserve.router.http.shape import PromptView, TokenFormat, finish_of, number
from pdserve.router.instructions import Finish
from pdserve.router.output import Shown
from pdserve.router.request import ValidRequest


class ChatShape:
    """The answer's form. An answer that calls tools ends with `tool_calls`."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokens: TokenFormat) -> None:
        self._tokens, self._wishes = tokens, tokens.wishes
        self._callers: set[int] = set()

    def opening(self, index: int, prompt: PromptView) -> JsonObject | None:
        """Return the role, and what was asked of the prompt."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None) | self._tokens.of_prompt(prompt)

    def gained(self, index: int, shown: Shown) -> JsonObject:
        """Return new content, reasoning, calls and tokens."""
        delta: JsonObject = {}
        if shown.text or not (shown.reasoning or shown.tool_calls):
            delta["content"] = shown.text
        if shown.reasoning:
            delta["reasoning_content"] = shown.reasoning
        if shown.tool_calls:
            self._callers.add(index)
            delta["tool_calls"] = [_call_delta(gain) for gain in shown.tool_calls]
        return self._chunk(index, delta, self._scores(shown.tokens)) | self._tokens.ids_of(shown)

    def ended(self, index: int, finish: Finish, request: ValidRequest) -> JsonObject:
        """Return the end."""
        return self._chunk(index, {}, None) | self._end(index, finish, request)

    def whole(self, index: int, shown: Shown, finish: Finish, prompt: PromptView) -> JsonObject:
        """Return the whole choice."""
        message: JsonObject = {"role": "assistant", "content": shown.text, "refusal": None}
        if shown.reasoning:
            message["reasoning_content"] = shown.reasoning
        if shown.tool_calls:
            self._callers.add(index)
            message["content"] = shown.text or None
            message["tool_calls"] = _calls(shown.tool_calls)
        choice: JsonObject = {"index": index, "message": message, "logprobs": self._scores(shown.tokens)}
        return (
            choice
            | self._end(index, finish, prompt.request)
            | self._tokens.of_prompt(prompt)
            | self._tokens.ids_of(shown)
        )

    def _chunk(self, index: int, delta: JsonObject, scores: JsonObject | None) -> JsonObject:
        return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": None}

    def _end(self, index: int, finish: Finish, request: ValidRequest) -> JsonObject:
        reason, stop = finish_of(finish, request)
        if reason == "stop" and index in self._callers:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop}

    def _scores(self, tokens: Sequence[SampledToken]) -> JsonObject | None:
        num_top = self._wishes.num_top
        if num_top is None:
            return None
        return {
            "content": [
                self._entry(token.token_id, token.logprob)
                | {"top_logprobs": [self._entry(*one) for one in token.top[:num_top]]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> JsonObject:
        return {
            "token": self._tokens.name(token_id),
            "logprob": number(logprob),
            "bytes": list(self._tokens.texts.bytes_of(token_id)),
        }


def _call_delta(gain: ToolCallGain) -> JsonObject:
    delta: JsonObject = {"index": gain.index}
    function: JsonObject = {"arguments": gain.arguments}
    if gain.id:
        delta |= {"id": gain.id, "type": "function"}
    if gain.name:
        function = {"name": gain.name, "arguments": gain.arguments}
    return delta | {"function": function}


def _calls(gains: Sequence[ToolCallGain]) -> list[JsonObject]:
    """Return whole calls from their gains, in order."""
    calls: dict[int, ToolCallGain] = {}
    for gain in gains:
        before = calls.get(gain.index, ToolCallGain(gain.index))
        calls[gain.index] = ToolCallGain(
            gain.index, before.id or gain.id, before.name or gain.name, before.arguments + gain.arguments
        )
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for _, call in sorted(calls.items())
    ]
