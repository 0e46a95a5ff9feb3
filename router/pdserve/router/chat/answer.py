"""One sequence's text, read: content, reasoning and tool calls. Reasoning comes first; calls are looked for in the rest."""

from pdserve.router.chat.call_format import CallFormat
from pdserve.router.chat.gains import NOTHING, AnswerGain
from pdserve.router.chat.think import ThinkReasoning


class AnswerReader:
    """Reads a sequence's text, piece by piece; either part may be missing."""

    def __init__(self, reasoning: ThinkReasoning | None, calls: CallFormat | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def push(self, text: str) -> AnswerGain:
        """Take the next piece of text that no stop can take back."""
        if not text:
            return NOTHING
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return self._read(reasoning, text)

    def finish(self) -> AnswerGain:
        """Take the end of the sequence. May be called once."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.finish()
        gain = self._read(reasoning, text)
        if self._calls is None:
            return gain
        last = self._calls.finish()
        return AnswerGain(gain.content + last.content, gain.reasoning, gain.tool_calls + last.tool_calls)

    def _read(self, reasoning: str, text: str) -> AnswerGain:
        if self._calls is None:
            return AnswerGain(text, reasoning)
        gain = self._calls.push(text)
        return AnswerGain(gain.content, reasoning, gain.tool_calls)
