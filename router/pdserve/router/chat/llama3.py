"""Llama 3.1 and 3.2: the answer is `{"name": …, "parameters": {…}}`, or several of them with `;` between; or such behind
`<|python_tag|>`, anywhere.

Without the marker an object is a call only as the first thing of the answer, and only if it names a tool of the request: an
answer may well be JSON. Code behind the marker, which Llama writes for its built-in tools, is content with its marker.
Format: the model cards' prompt format.
"""

from collections.abc import Collection

from pdserve.router.chat.call_format import CallFormat
from pdserve.router.chat.gains import Collected
from pdserve.router.chat.json_scan import WHITE_SPACE

TAG = "<|python_tag|>"


class Llama3Calls(CallFormat):
    """Reads an answer in this format."""

    opener = TAG
    markers = (TAG,)

    def __init__(self, names: Collection[str], collected: Collected | None = None) -> None:
        super().__init__(names, collected)
        self._feed = self._opened

    def _opened(self, char: str) -> None:
        self._raw += char
        if char == "{":
            self._begin_call(None if self._raw.startswith(TAG) else self._names)
        elif char not in WHITE_SPACE:
            self._give_up()

    def _behind(self, char: str) -> None:
        if char == ";" and ";" not in self._raw:
            self._raw += char
        else:
            self._opened(char)
