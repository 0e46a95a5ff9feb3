"""What the text of an answer led to: content, reasoning and tool calls; and the place where a reader collects it.

White space: what stands before a call, at the start of the answer or between calls, is kept back until other text follows. A
call or the end after calls drops it. All other content is passed on as it is.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallGain:
    """What one tool call gained: `id` and `name` once, whole, in its first gain; `arguments` is more of its JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerGain:
    """What a piece of text led to. Each part concatenates over gains."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallGain, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self.content or self.reasoning or self.tool_calls)


def merged_calls(gains: Iterable[ToolCallGain]) -> tuple[ToolCallGain, ...]:
    """Return the gains with neighbours of one call joined; that changes nothing for who concatenates them."""
    merged: list[ToolCallGain] = []
    for gain in gains:
        if merged and merged[-1].index == gain.index:
            last = merged[-1]
            merged[-1] = ToolCallGain(
                gain.index, last.id or gain.id, last.name or gain.name, last.arguments + gain.arguments
            )
        else:
            merged.append(gain)
    return tuple(merged)


def new_call_id() -> str:
    """Return an id of nine letters and digits, the form that Mistral's templates demand and all others take."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    return "".join(secrets.choice(alphabet) for _ in range(9))


class Collected:
    """What a reader has found since the last `take`."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._content: list[str] = []
        self._calls: list[ToolCallGain] = []
        self._blank = ""
        self._is_edge = True
        self._num_calls = 0

    def content(self, text: str) -> None:
        """Add text that is no part of a call."""
        if self._is_edge:
            self._blank += text
            if not self._blank or self._blank.isspace():
                return
            text, self._blank, self._is_edge = self._blank, "", False
        self._content.append(text)

    def open_call(self, name: str, call_id: str = "") -> None:
        """Begin the next call; arguments added from now on are its."""
        self._blank, self._is_edge = "", True
        self._calls.append(ToolCallGain(self._num_calls, call_id or self._new_id(), name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the latest call."""
        if text:
            self._calls.append(ToolCallGain(self._num_calls - 1, arguments=text))

    def take(self) -> AnswerGain:
        """Return what was found, and forget it."""
        if not self._content and not self._calls:
            return NOTHING
        gain = AnswerGain("".join(self._content), tool_calls=merged_calls(self._calls))
        self._content.clear()
        self._calls.clear()
        return gain

    def finish(self) -> AnswerGain:
        """Return the last of it: white space alone is an answer too, unless it stands by a call."""
        if self._blank and self._num_calls == 0:
            self._content.append(self._blank)
        self._blank = ""
        return self.take()


NOTHING = AnswerGain()
