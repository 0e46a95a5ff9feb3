"""Markers in a stream of characters: text is held only while it could still become a marker."""

from collections.abc import Callable, Sequence


class MarkerScan:
    """Looks for `markers` (none of them the beginning of another) and hands on all other text through `release`."""

    def __init__(self, markers: Sequence[str], release: Callable[[str], None]) -> None:
        self._markers = tuple(markers)
        self._firsts = frozenset(marker[0] for marker in markers)
        self._release = release
        self.held = ""

    def feed(self, char: str) -> str | None:
        """Take a character; return the marker that it completes, if any."""
        held = self.held + char
        start = 0
        while start < len(held) and not any(marker.startswith(held[start:]) for marker in self._markers):
            start += 1
        if start:
            self._release(held[:start])
        self.held = held[start:]
        if self.held in self._markers:
            marker, self.held = self.held, ""
            return marker
        return None

    def skips(self, text: str) -> bool:
        """Whether no marker touches `text`; it may then be released whole."""
        return not self.held and self._firsts.isdisjoint(text)

    def flush(self) -> None:
        """Release what is held: the text is over, or it goes on by other rules."""
        held, self.held = self.held, ""
        if held:
            self._release(held)
