"""Mistral: behind `[TOOL_CALLS]` either a list `[{"name": …, "arguments": {…}}, …]`, or `name[ARGS]{…}` (newer tokenizers; an
id may stand between: `name[CALL_ID]id[ARGS]{…}`, and `[ARGS]` may be left out), the marker repeated for each call.

Text behind the calls is content. Format: mistral-common's tokenizers v3 to v13.
"""

import re
from collections.abc import Collection

from pdserve.router.chat.call_format import CallFormat
from pdserve.router.chat.gains import Collected
from pdserve.router.chat.json_scan import WHITE_SPACE, JsonScan, Step, escaped

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralCalls(CallFormat):
    """Reads an answer in this format. The marker says that it is a call, of whatever tool."""

    opener = CALLS
    markers = (CALLS, ARGS, CALL_ID)

    def __init__(self, names: Collection[str], collected: Collected | None = None) -> None:
        super().__init__(names, collected)
        self._scan = JsonScan()

    def _opened(self, char: str) -> None:
        self._raw += char
        if char == "[":
            self._feed = self._in_list
        elif char == "{":
            self._begin_call()
        elif char not in WHITE_SPACE:
            self._feed = self._in_head
            self._check_head()

    def _in_list(self, char: str) -> None:
        self._raw += char
        if char == "{":
            self._begin_call()
        elif char not in WHITE_SPACE:
            self._give_up()

    def _behind(self, char: str) -> None:
        if char == "]":
            self._raw, self._feed = "", self._in_content
        elif char == "," and "," not in self._raw:
            self._raw += char
        else:
            self._in_list(char)

    def _in_head(self, char: str) -> None:
        self._raw += char
        self._check_head()

    def _check_head(self) -> None:
        head = self._raw.removeprefix(CALLS)
        whole = HEAD.fullmatch(head)
        if whole is not None:
            self._found.open_call(whole["name"], whole["id"] or "")
            self._raw, self._scan, self._feed = "", JsonScan(), self._in_arguments
            self._feed("{")
        elif HEAD_PREFIX.fullmatch(head) is None:
            self._give_up()

    def _argument_scan(self) -> JsonScan | None:
        return self._scan if self._feed == self._in_arguments else super()._argument_scan()

    def _in_arguments(self, char: str) -> None:
        text = escaped(char) if self._scan.in_string else char
        step = self._scan.feed(char)
        if step is Step.FAULT:
            self._break_off(char)
            return
        self._found.arguments(text)
        if step is Step.DONE:
            self._feed = self._in_content


def _head_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what stands between the marker and the arguments of a call, with their first brace; and every beginning of it."""
    blank, name, call_id = r"\s{0,32}", r"[\w.:/-]{1,256}", r"\w{1,64}"
    args, tag = re.escape(ARGS), re.escape(CALL_ID)
    whole = rf"{blank}(?P<name>{name}){blank}({tag}{blank}(?P<id>{call_id}){blank})?({args}{blank})?\{{"
    with_id = rf"{name}{blank}{tag}{blank}"
    beginnings = [
        rf"({name})?{blank}",
        rf"{name}{blank}{_beginning(CALL_ID)}",
        rf"{with_id}({call_id})?{blank}",
        rf"({name}{blank}|{with_id}{call_id}{blank}){_beginning(ARGS)}",
        rf"({name}{blank}|{with_id}{call_id}{blank}){args}{blank}",
    ]
    return re.compile(whole, re.ASCII), re.compile(rf"{blank}({'|'.join(beginnings)})", re.ASCII)


def _beginning(marker: str) -> str:
    """Return a pattern of every proper beginning of `marker`."""
    return "(" + "|".join(re.escape(marker[:length]) for length in range(1, len(marker))) + ")"


HEAD, HEAD_PREFIX = _head_patterns()
