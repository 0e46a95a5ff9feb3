"""One tool call as a model writes it: an object with the tool's name and its arguments, in either order, character by
character.

The call is *told* once its name is whole and its arguments, a JSON object, have begun (or the object ended without any: then
they are `{}`). Until then it may still turn out to be no call; from then on its arguments are handed on as they come. Members
besides `name` and `arguments` (Llama's `parameters`) are skipped.
"""

import json
from collections.abc import Collection
from enum import Enum, auto

from pdserve.router.chat.json_scan import WHITE_SPACE, JsonScan, Step, escaped

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
MAX_NAME_CHARS = 256


class _Place(Enum):
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER = auto()


class CallReader:
    """Reads `{"name": …, "arguments": {…}}` from after its `{`. With `names`, a call of any other tool is a fault."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._place = _Place.FIRST_KEY
        self._scan = JsonScan()
        self._token = ""
        self._key: str | None = None
        self._arguments = ""
        self._has_arguments = False
        self._has_name = False
        self.name = ""

    @property
    def is_told(self) -> bool:
        """Whether this is a call, whatever follows."""
        return self._has_name and self._has_arguments

    @property
    def argument_scan(self) -> JsonScan | None:
        """Where a told call stands in its arguments; None if elsewhere."""
        is_inside = self._place is _Place.VALUE and self._key in ARGUMENT_KEYS and bool(self._token)
        return self._scan if is_inside and self.is_told else None

    def take_arguments(self) -> str:
        """Return the arguments' text since the last time."""
        text, self._arguments = self._arguments, ""
        return text

    def feed(self, char: str) -> Step:
        """Take the next character: MORE, DONE with the closing brace, or FAULT."""
        if self._key is not None and self._place is _Place.VALUE:
            return self._value(char)
        if self._key is None and self._place in (_Place.FIRST_KEY, _Place.KEY):
            return self._in_key(char)
        if char in WHITE_SPACE:
            return Step.MORE
        if self._place is _Place.COLON:
            self._place, self._token, self._scan = _Place.VALUE, "", JsonScan()
            return Step.MORE if char == ":" else Step.FAULT
        return self._between(char)

    def _in_key(self, char: str) -> Step:
        if not self._token:
            if char in WHITE_SPACE:
                return Step.MORE
            if char == "}" and self._place is _Place.FIRST_KEY:
                return self._close()
            if char != '"':
                return Step.FAULT
        self._token += char
        step = self._scan.feed(char)
        if step is Step.DONE:
            self._key = _text_of(self._token)
            self._place = _Place.COLON
            return Step.MORE
        return step

    def _value(self, char: str) -> Step:
        is_arguments, is_name = self._key in ARGUMENT_KEYS, self._key == "name"
        if not self._token:
            if char in WHITE_SPACE:
                return Step.MORE
            is_repeated = (is_arguments and self._has_arguments) or (is_name and self._has_name)
            if is_repeated or (is_arguments and char != "{") or (is_name and char != '"'):
                return Step.FAULT
            self._has_arguments |= is_arguments
        text = escaped(char) if self._scan.in_string else char
        step = self._scan.feed(char)
        if step is Step.FAULT:
            return step
        if step is Step.PAST:
            self._end_value()
            return Step.MORE if char in WHITE_SPACE else self._between(char)
        self._token = self._token + char if is_name else "…"
        if is_arguments:
            self._arguments += text
        if is_name and len(self._token) > MAX_NAME_CHARS:
            return Step.FAULT
        if step is Step.DONE:
            return self._end_name() if is_name else self._end_value()
        return Step.MORE

    def _end_name(self) -> Step:
        self.name = _text_of(self._token)
        # Lone surrogates, which escapes can spell, are not printable; they could not be sent.
        is_usable = bool(self.name) and self.name.isprintable()
        self._has_name = is_usable and (self._names is None or self.name in self._names)
        return self._end_value() if self._has_name else Step.FAULT

    def _end_value(self) -> Step:
        self._key, self._token, self._place = None, "", _Place.AFTER
        return Step.MORE

    def _between(self, char: str) -> Step:
        if char == ",":
            self._place, self._scan = _Place.KEY, JsonScan()
            return Step.MORE
        return self._close() if char == "}" else Step.FAULT

    def _close(self) -> Step:
        if not self._has_name:
            return Step.FAULT
        if not self._has_arguments:
            self._has_arguments, self._arguments = True, "{}"
        return Step.DONE


def _text_of(token: str) -> str:
    return str(json.loads(token, strict=False))
