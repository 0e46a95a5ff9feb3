"""Reasoning between `<think>` and `</think>` at the start of an answer; a chat template may have written the first marker
already.

Only the start counts: `<think>` behind other text is content. White space at both ends of the reasoning, and line breaks
right behind its end marker, belong to the markers. An answer that ends inside is reasoning alone. Format: the chat templates
of DeepSeek R1 and Qwen 3.
"""

from pdserve.router.chat.markers import MarkerScan

OPEN, CLOSE = "<think>", "</think>"


class ThinkReasoning:
    """Parts an answer into reasoning and the rest. With `is_open` the prompt ended behind the first marker."""

    markers = (OPEN, CLOSE)

    def __init__(self, is_open: bool) -> None:
        self._inside = MarkerScan((CLOSE,), self._add)
        self._reasoning: list[str] = []
        self._blank = ""
        self._has_begun = False
        self._start = ""
        self._rest: list[str] = []
        self._feed = self._in_reasoning if is_open else self._at_start

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece; return the (reasoning, rest) that it led to."""
        if self._feed == self._behind:
            return "", text
        if self._feed == self._in_reasoning and self._inside.skips(text):
            self._add(text)
        else:
            for char in text:
                self._feed(char)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """Take the end of the answer."""
        self._rest.append(self._start)
        self._start = ""
        self._inside.flush()
        return self._take()

    def _take(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._rest)
        self._reasoning.clear()
        self._rest.clear()
        return taken

    def _at_start(self, char: str) -> None:
        self._start += char
        begun = self._start.lstrip()
        if begun == OPEN:
            self._start, self._feed = "", self._in_reasoning
        elif not OPEN.startswith(begun):
            self._rest.append(self._start)
            self._start, self._feed = "", self._behind

    def _in_reasoning(self, char: str) -> None:
        if self._inside.feed(char) is not None:
            self._blank, self._feed = "", self._at_rest

    def _at_rest(self, char: str) -> None:
        if char not in "\r\n":
            self._feed = self._behind
            self._behind(char)

    def _behind(self, char: str) -> None:
        self._rest.append(char)

    def _add(self, text: str) -> None:
        """Add reasoning, whose white space is kept until other text follows."""
        kept = self._blank + text
        shown = kept.rstrip()
        self._blank = kept[len(shown) :]
        if not self._has_begun:
            shown = shown.lstrip()
        if shown:
            self._has_begun = True
            self._reasoning.append(shown)
