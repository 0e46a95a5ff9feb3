"""What became of a grammar that was to be compiled."""

from dataclasses import dataclass
from enum import Enum


class GrammarRefused(Exception):
    """The grammar can never be served; the text says why, in a line."""


class Cause(Enum):
    """Why a grammar was not compiled."""

    REFUSED = "grammar_refused"
    """It can never be served."""
    LATE = "grammar_too_slow"
    """It takes too long."""
    BUSY = "grammar_queue_full"
    """Too many others wait."""


@dataclass(frozen=True, slots=True)
class NotCompiled:
    """No compiled grammar, and why; `reason` is one line for the client."""

    cause: Cause
    reason: str
