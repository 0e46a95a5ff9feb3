"""The languages that an answer can be held to."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that this schema accepts; a mapping, or JSON text that is sent as it is."""

    schema: str | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that, whole, matches this regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of these texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a context-free grammar, in Lark's syntax or in GBNF."""

    grammar: str


Language = JsonSchema | JsonObject | Regex | OneOf | Grammar
