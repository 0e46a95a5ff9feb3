"""Stop texts over a stream of text pieces: what can be shown, and where the first stop ends the answer.

The answer ends at the first character at which the text ends with any stop; among stops that end there the longest counts.
So the result does not depend on how the text was cut into pieces. Text is held back only while it could still become part of
a stop.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStep:
    """What one piece of text led to: text that no stop can take back, and the stop that matched, if any."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Looks for `stops` (each not empty) in the concatenation of all pushed pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    @property
    def held(self) -> str:
        """Text that could still become part of a stop."""
        return self._held

    def push(self, text: str) -> StopStep:
        """Take the next piece. After a match nothing may be pushed any more."""
        if not self._stops:
            return StopStep(text)
        if not text:
            return StopStep("")
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            start, stop = match
            self._held = ""
            return StopStep(buffer[:start], stop)
        keep = self._possible_start(buffer)
        self._held = buffer[len(buffer) - keep :]
        return StopStep(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """Return the held text; the stream has ended, so it is no part of a stop."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, buffer: str) -> int:
        """Return the length of the longest suffix that a longer stop begins with."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
