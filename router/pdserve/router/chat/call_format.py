"""What all formats of tool calls share: text outside of calls, one call in JSON, and what becomes of text that is no call.

The rule of every format: from its first character to the point where it is told (see `call_reader`) a call may still be
refuted; then the text since its marker is content, and what follows the marker is looked through again. A told call stays
told: if its text breaks off or goes wrong later, its arguments end there and the text from the fault on is content. So every
character is content, part of a call, or one of the format's own separators, and the result does not depend on how the text
was cut into pieces.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from pdserve.router.chat.call_reader import CallReader
from pdserve.router.chat.gains import AnswerGain, Collected
from pdserve.router.chat.json_scan import JsonScan, Step
from pdserve.router.chat.markers import MarkerScan

MAX_UNTOLD_CHARS = 64 * 1024
"""Characters of a call that is not told; with more of them it is none."""

Feed = Callable[[str], None]


class CallFormat(ABC):
    """Reads an answer in one format, character by character; a subclass says what may stand behind `opener`.

    `names` are those of the request's tools. `markers` lists every text that a model's tokenizer may have as a special token.
    """

    opener: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, names: Collection[str], collected: Collected | None = None) -> None:
        self._names = frozenset(names)
        self._found = collected or Collected()
        self._outside = MarkerScan((self.opener,), self._found.content)
        self._reader = CallReader()
        self._raw = ""
        self._feed: Feed = self._in_content

    def push(self, text: str) -> AnswerGain:
        """Take the next piece of text."""
        if self._feed == self._in_content and self._outside.skips(text):
            self._found.content(text)
        else:
            self._feed_all(text)
        return self._found.take()

    def finish(self) -> AnswerGain:
        """Take the end of the answer."""
        self._found.content(self._raw)
        self._outside.flush()
        return self._found.finish()

    @abstractmethod
    def _opened(self, char: str) -> None:
        """Take a character behind the opener."""

    @abstractmethod
    def _behind(self, char: str) -> None:
        """Take a character behind a call in JSON."""

    def _feed_all(self, text: str) -> None:
        start = 0
        while start < len(text):
            scan = self._argument_scan()
            if scan is not None and (end := scan.end_of_plain(text, start)) > start:
                self._found.arguments(text[start:end])
                start = end
                continue
            self._feed(text[start])
            start += 1
            if len(self._raw) > MAX_UNTOLD_CHARS:
                self._give_up()

    def _argument_scan(self) -> JsonScan | None:
        """Return where the text stands in the arguments of a told call; None anywhere else."""
        return self._reader.argument_scan if self._feed == self._in_call else None

    def _in_content(self, char: str) -> None:
        if self._outside.feed(char) is not None:
            self._raw, self._feed = self.opener, self._opened

    def _begin_call(self, names: Collection[str] | None = None) -> None:
        """Read a call in JSON from behind its first brace, which is in `_raw` already."""
        self._reader, self._feed = CallReader(names), self._in_call

    def _in_call(self, char: str) -> None:
        was_told = self._reader.is_told
        step = self._reader.feed(char)
        if not was_told:
            self._raw += char
            if step is Step.FAULT:
                self._give_up()
                return
            if not self._reader.is_told:
                return
            self._found.open_call(self._reader.name)
            self._raw = ""
        self._found.arguments(self._reader.take_arguments())
        if step is Step.DONE:
            self._feed = self._behind
        elif step is Step.FAULT:
            self._break_off(char)

    def _break_off(self, char: str) -> None:
        """End a told call at a character that cannot belong to it."""
        self._feed = self._in_content
        self._feed(char)

    def _give_up(self) -> None:
        """What was read is no call: its marker is content, and the rest is looked through again."""
        raw, self._raw, self._feed = self._raw, "", self._in_content
        if raw.startswith(self.opener):
            self._found.content(self.opener)
        for char in raw.removeprefix(self.opener):
            self._feed(char)
