"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, anywhere in the text.

White space inside the markers is free. Behind a call its end marker is taken away; text before that is content. Format: the
chat template of NousResearch's Hermes 2 Pro, and Qwen's.
"""

from collections.abc import Collection

from pdserve.router.chat.call_format import CallFormat
from pdserve.router.chat.gains import AnswerGain, Collected
from pdserve.router.chat.json_scan import WHITE_SPACE
from pdserve.router.chat.markers import MarkerScan

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls(CallFormat):
    """Reads an answer in this format. The markers say that it is a call, of whatever tool."""

    opener = OPEN
    markers = (OPEN, CLOSE)

    def __init__(self, names: Collection[str], collected: Collected | None = None) -> None:
        super().__init__(names, collected)
        self._end = MarkerScan(self.markers, self._found.content)

    def finish(self) -> AnswerGain:
        """Take the end of the answer; a last call without its end marker is one."""
        self._end.flush()
        return super().finish()

    def _opened(self, char: str) -> None:
        self._raw += char
        if char == "{":
            self._begin_call()
        elif char not in WHITE_SPACE:
            self._give_up()

    def _behind(self, char: str) -> None:
        marker = self._end.feed(char)
        if marker == CLOSE:
            self._feed = self._in_content
        elif marker == OPEN:
            self._raw, self._feed = OPEN, self._opened

    def _break_off(self, char: str) -> None:
        self._feed = self._behind
        self._feed(char)
