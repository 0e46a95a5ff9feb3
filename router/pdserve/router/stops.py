"""Stop texts over a stream of text pieces: what can be shown, and where the first stop ends the answer.

The answer ends at the first character at which the text ends with any stop; among stops that end there the longest counts.
So the result does not depend on how the text was cut into pieces. Text is held back only while it could still become part of
the stop that ends the answer, and not at all if the stop is shown. The first pieces may be exempt: no stop ends in them, but one
may begin there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopStep:
    """What one piece of text led to: text that no stop can take back, and the stop that matched, if any.

    With `include` the text ends with the stop that matched.
    """

    text: str
    matched: str | None = None


class StopMatcher:
    """Looks for `stops` (each not empty) in the concatenation of all pushed pieces; the first `num_exempt` are exempt."""

    def __init__(self, stops: Sequence[str], *, include: bool = False, num_exempt: int = 0) -> None:
        self._stops = dict(_inner_ends(tuple(stops)))
        self._include, self._num_exempt = include, num_exempt
        self._num_pieces = 0
        self._longest = max(map(len, stops), default=0)
        self._begun = ""
        """The end of the text so far, if a stop begins with it."""

    @property
    def held(self) -> str:
        """Text that was not given out: it could still become part of a stop."""
        return "" if self._include else self._begun

    def push(self, text: str, *, is_rest: bool = False) -> StopStep:
        """Take the next piece, or the rest of the last one. After a match nothing may be pushed any more."""
        self._num_pieces += not is_rest
        if not self._stops:
            return StopStep(text)
        if not text and self._num_pieces != self._num_exempt:  # with the last exempt piece, less needs to be held
            return StopStep("")
        buffer, num_given = self._begun + text, len(self._begun) if self._include else 0
        match = None if self._num_pieces <= self._num_exempt else self._first_match(buffer, len(self._begun))
        if match is not None:
            start, stop = match
            self._begun = ""
            return StopStep(buffer[num_given : start + len(stop) if self._include else start], stop)
        keep = self._possible_start(buffer)
        self._begun = buffer[len(buffer) - keep :]
        return StopStep(buffer[num_given:] if self._include else buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """Return the held text; the stream has ended, so it is no part of a stop."""
        held, self._begun = self.held, ""
        return held

    def _first_match(self, buffer: str, num_searched: int) -> tuple[int, str] | None:
        """Return where the first stop begins that ends behind `num_searched` characters, and which it is."""
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := buffer.find(stop, max(0, num_searched - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, buffer: str) -> int:
        """Return the length of the longest suffix that a longer stop begins with, if that one can be the first to end.

        It cannot if it goes on with a shorter stop, unless that one ends in an exempt piece.
        """
        may_pass_over = self._num_pieces < self._num_exempt
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-length:]
            for stop, inner_end in self._stops.items():
                if len(stop) > length and stop.startswith(tail) and (may_pass_over or inner_end <= length):
                    return length
        return 0


@lru_cache(maxsize=32)  # the sequences of a request have the same stops
def _inner_ends(stops: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return each stop with the last place before its end at which it ends with any of `stops`; 0 if there is none."""
    return tuple(
        (stop, max((end for end in range(1, len(stop)) if stop[:end].endswith(stops)), default=0)) for stop in stops
    )
