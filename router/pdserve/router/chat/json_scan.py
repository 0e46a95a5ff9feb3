"""One JSON value, character by character: where it ends, and where it stops being JSON (RFC 8259).

One leniency: a raw control character inside a string passes, since models write line breaks so; `escaped` is what to hand on
instead.
"""

import re
from enum import Enum, auto

WHITE_SPACE = frozenset(" \t\n\r")
NUMBER_CHARS = frozenset("+-.eE0123456789")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
HEX_CHARS = frozenset("0123456789abcdefABCDEF")
LITERALS = ("true", "false", "null")
SHORT_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class Step(Enum):
    """What a character did."""

    MORE = auto()
    """The value goes on."""
    DONE = auto()
    """The character is the last of the value."""
    PAST = auto()
    """The value, a number, ended before the character."""
    FAULT = auto()
    """The text up to the character is no beginning of JSON."""


class _Place(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonScan:
    """Scans one value; white space before it passes. Nothing may be fed after DONE, PAST or FAULT."""

    def __init__(self) -> None:
        self._place = _Place.VALUE
        self._closers: list[str] = []
        self._token = ""
        self._is_key = False

    @property
    def in_string(self) -> bool:
        """Whether the next character stands in a string."""
        return self._place is _Place.STRING

    def end_of_plain(self, text: str, start: int) -> int:
        """Return where the characters end that are a string's own: feeding them changes nothing, so they may be skipped."""
        found = PLAIN.match(text, start) if self._place is _Place.STRING else None
        return start if found is None else found.end()

    def feed(self, char: str) -> Step:
        """Take the next character."""
        match self._place:
            case _Place.STRING:
                return self._string(char)
            case _Place.ESCAPE | _Place.HEX:
                return self._escape(char)
            case _Place.NUMBER:
                return self._number(char)
            case _Place.LITERAL:
                return self._literal(char)
        if char in WHITE_SPACE:
            return Step.MORE
        return self._structure(char)

    def _structure(self, char: str) -> Step:
        match self._place:
            case _Place.FIRST_ITEM | _Place.FIRST_KEY if char == self._closers[-1]:
                return self._close()
            case _Place.FIRST_KEY | _Place.KEY:
                self._is_key, self._place = True, _Place.STRING
                return Step.MORE if char == '"' else Step.FAULT
            case _Place.COLON:
                self._place = _Place.VALUE
                return Step.MORE if char == ":" else Step.FAULT
            case _Place.AFTER if char == ",":
                self._place = _Place.KEY if self._closers[-1] == "}" else _Place.VALUE
                return Step.MORE
            case _Place.AFTER:
                return self._close() if char == self._closers[-1] else Step.FAULT
        return self._value(char)

    def _value(self, char: str) -> Step:
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self._place = _Place.FIRST_KEY if char == "{" else _Place.FIRST_ITEM
        elif char == '"':
            self._is_key, self._place = False, _Place.STRING
        elif char == "-" or (char.isascii() and char.isdigit()):
            self._token, self._place = char, _Place.NUMBER
        elif char in "tfn":
            self._token, self._place = char, _Place.LITERAL
        else:
            return Step.FAULT
        return Step.MORE

    def _string(self, char: str) -> Step:
        if char == "\\":
            self._token, self._place = "", _Place.ESCAPE
        elif char == '"' and self._is_key:
            self._place = _Place.COLON
        elif char == '"':
            return self._ended()
        return Step.MORE

    def _escape(self, char: str) -> Step:
        if self._place is _Place.ESCAPE:
            self._place = _Place.HEX if char == "u" else _Place.STRING
            return Step.MORE if char in '"\\/bfnrtu' else Step.FAULT
        self._token += char
        if len(self._token) == 4:
            self._place = _Place.STRING
        return Step.MORE if char in HEX_CHARS else Step.FAULT

    def _number(self, char: str) -> Step:
        if char in NUMBER_CHARS:
            self._token += char
            return Step.MORE
        if NUMBER.fullmatch(self._token) is None:
            return Step.FAULT
        if not self._closers:
            return Step.PAST
        self._place = _Place.AFTER
        return Step.MORE if char in WHITE_SPACE else self._structure(char)

    def _literal(self, char: str) -> Step:
        self._token += char
        if self._token in LITERALS:
            return self._ended()
        return Step.MORE if any(literal.startswith(self._token) for literal in LITERALS) else Step.FAULT

    def _close(self) -> Step:
        self._closers.pop()
        return self._ended()

    def _ended(self) -> Step:
        self._place = _Place.AFTER
        return Step.MORE if self._closers else Step.DONE


def escaped(char: str) -> str:
    """Return a character of a JSON string; a raw control character as its escape."""
    if char >= " ":
        return char
    return SHORT_ESCAPES.get(char, f"\\u{ord(char):04x}")
