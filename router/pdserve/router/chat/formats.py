"""Which formats a model's answers have, chosen once, at start: by settings, or by what its template and vocabulary show."""

from collections.abc import Container
from dataclasses import dataclass

from pdserve.router.chat.answer import AnswerReader
from pdserve.router.chat.call_format import CallFormat
from pdserve.router.chat.hermes import HermesCalls
from pdserve.router.chat.llama3 import Llama3Calls
from pdserve.router.chat.mistral import MistralCalls
from pdserve.router.chat.think import CLOSE, OPEN, ThinkReasoning
from pdserve.router.chat.tool_grammar import OPENINGS, must_call
from pdserve.router.request import ValidChat

TOOL_FORMATS: dict[str, type[CallFormat]] = {"hermes": HermesCalls, "llama3": Llama3Calls, "mistral": MistralCalls}
OTHER_CALLS = ("<function=", "<arg_key>")
"""Marks of formats that share a marker with Hermes and are others: Qwen 3 Coder's, GLM's."""


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """What a model's answers may hold: the format of their tool calls by name, None if it is not known; and reasoning."""

    tools: str | None = None
    thinks: bool = False

    def markers(self, chat: ValidChat) -> tuple[str, ...]:
        """Return the texts that show even where the vocabulary has them as special tokens."""
        calls = TOOL_FORMATS[self.tools].markers if self.tools is not None and chat.shown_tools else ()
        return (*calls, *(ThinkReasoning.markers if self.thinks else ()))

    def reader(self, chat: ValidChat, prompt_end: str) -> AnswerReader | None:
        """Return a reader for one answer, None if all of it is plain text. `prompt_end` is the last text of the prompt."""
        if chat.parse_output is False:
            return None
        names = [tool.name for tool in chat.shown_tools]
        if must_call(chat):
            return AnswerReader(None, Llama3Calls(names))  # JSON alone: the prompt has opened the call
        calls = TOOL_FORMATS[self.tools](names) if self.tools is not None and names else None
        reasoning = ThinkReasoning(_is_open(chat, prompt_end)) if self.thinks else None
        return None if calls is None and reasoning is None else AnswerReader(reasoning, calls)

    def opening(self, chat: ValidChat, prompt: str) -> str:
        """Return what the prompt says on the assistant's behalf if the answer must be a call: the call's opening."""
        if not must_call(chat):
            return ""
        closing = f"\n{CLOSE}\n\n" if self.thinks and _is_open(chat, prompt) else ""
        return closing + OPENINGS.get(self.tools or "", "")


NO_FORMATS = AnswerFormats()


def choose_formats(tools: str, reasoning: str, template: str, tokens: Container[str]) -> AnswerFormats:
    """Return the formats by setting (auto, none, or a format's name); `template` is the model's, `tokens` its vocabulary."""
    found = _tools_by_looks(template, tokens) if tools == "auto" else tools
    thinks = CLOSE in template or CLOSE in tokens if reasoning == "auto" else reasoning == "think"
    return AnswerFormats(None if found == "none" else found, thinks)


def _tools_by_looks(template: str, tokens: Container[str]) -> str | None:
    if "tools" not in template or any(mark in template for mark in OTHER_CALLS):
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if "<|python_tag|>" in template or "<|python_tag|>" in tokens else None


def _is_open(chat: ValidChat, prompt_end: str) -> bool:
    """Whether the answer begins inside of the reasoning: the template, or the text to be continued, has opened it."""
    if chat.continues_turn:
        content = chat.turns[-1].content or ""
        return content.lstrip().startswith(OPEN) and CLOSE not in content
    return chat.opens_turn and prompt_end.rstrip().endswith(OPEN)
