"""A conversation and what the user may say beside it: sans-IO; the terminal is `chat`'s."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from pdserve.client import Chat, Turn
from pdserve.core.errors import InvalidRequest

ANSWER_ROOM = 256
"""Tokens that the model's length should leave for an answer whose length was not bounded; less for short models."""


class Command(Enum):
    """What a line that begins with / asks for."""

    HELP = "/help"
    RESET = "/reset"
    SYSTEM = "/system"
    RETRY = "/retry"
    QUIT = "/quit"


HELP: Mapping[Command, str] = {
    Command.HELP: "show this",
    Command.RESET: "forget the conversation; the system message stays",
    Command.SYSTEM: "show the system message; with a text: change it and begin anew; with -: remove it",
    Command.RETRY: "ask the last question again in place of its answer",
    Command.QUIT: "leave, as Ctrl-D does",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's: text to the model (no command), or a command with the rest of its line."""

    text: str
    command: Command | None = None


def parse_line(line: str) -> Line:
    """Return what the user meant. // begins a text with /. Raises InvalidRequest for a command that is none."""
    text = line.strip()
    if text.startswith("//"):
        return Line(text[1:])
    if not text.startswith("/"):
        return Line(text)
    word, _, rest = text.partition(" ")
    try:
        return Line(rest.strip(), Command(word))
    except ValueError:
        known = ", ".join(command.value for command in Command)
        raise InvalidRequest(f"{word} is no command", hint=f"{known}; // begins a text with /") from None


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question that was answered, if only in part."""

    question: str
    answer: str
    reasoning: str = ""


class Conversation:
    """What was said so far, and what is being asked."""

    def __init__(self, system: str = "", template_arguments: str = "") -> None:
        self.system = system
        self._template_arguments = template_arguments
        self._exchanges: list[Exchange] = []
        self._question: str | None = None
        self._last_question: str | None = None
        self._is_last_kept = False

    def __len__(self) -> int:
        return len(self._exchanges)

    def ask(self, question: str) -> None:
        """Begin an exchange."""
        self._question = self._last_question = question

    def ask_again(self) -> bool:
        """Begin the last exchange anew, also one that was never answered. Returns False if there is none."""
        if self._last_question is None:
            return False
        if self._is_last_kept and self._exchanges:
            self._exchanges.pop()
        self.ask(self._last_question)
        return True

    def answered(self, answer: str, reasoning: str = "") -> None:
        """Keep the answer that was shown; a question without one leaves nothing behind."""
        assert self._question is not None
        self._is_last_kept = bool(answer)
        if answer:
            self._exchanges.append(Exchange(self._question, answer, reasoning))
        self._question = None

    def reset(self, system: str | None = None) -> None:
        """Forget everything said; None keeps the system message."""
        self._exchanges.clear()
        self._question = self._last_question = None
        self.system = self.system if system is None else system

    def drop_oldest(self) -> bool:
        """Forget the oldest exchange. Returns False if there is none left."""
        if not self._exchanges:
            return False
        del self._exchanges[0]
        return True

    def chat(self) -> Chat:
        """Return the conversation with the question that waits for its answer."""
        assert self._question is not None
        turns = [Turn("system", self.system)] if self.system else []
        for exchange in self._exchanges:
            turns += [
                Turn("user", exchange.question),
                Turn("assistant", exchange.answer, reasoning=exchange.reasoning),
            ]
        turns.append(Turn("user", self._question))
        return Chat(tuple(turns), template_arguments=self._template_arguments)


def fits(num_prompt_tokens: int, max_model_len: int, max_tokens: int | None) -> bool:
    """Whether a prompt leaves room for an answer; a length of 0 is not known, and fits."""
    room = min(ANSWER_ROOM, max_model_len // 4) if max_tokens is None else min(max_tokens, max_model_len - 1)
    return max_model_len == 0 or num_prompt_tokens + room <= max_model_len
