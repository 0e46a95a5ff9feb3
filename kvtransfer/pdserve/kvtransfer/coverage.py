"""Which layers and tokens of a transfer have arrived: disjoint ranges, not a count."""

from bisect import bisect_left
from itertools import groupby

from pdserve.core.layout import KvLayout

Ranges = tuple[tuple[int, int], ...]
"""Disjoint half-open token ranges in ascending order."""


class Coverage:
    """Disjoint token ranges per layer, merged where they touch. All heads of a layer travel together.

    A frame holds the same tokens of many layers, which mostly held the same before: equal ones are looked at once.
    """

    def __init__(self, layout: KvLayout, num_tokens: int) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._ranges: list[Ranges] = [()] * layout.num_layers

    def overlaps(self, layers: range, tokens: range) -> bool:
        """Whether any layer holds any of the tokens already."""
        return any(_hits(ranges, tokens) for ranges in set(self._ranges[layers.start : layers.stop]))

    def add(self, layers: range, tokens: range) -> None:
        """Add a range that overlaps nothing."""
        at = layers.start
        for ranges, alike in groupby(self._ranges[layers.start : layers.stop]):
            num_alike = len(list(alike))
            self._ranges[at : at + num_alike] = [_joined(ranges, tokens)] * num_alike
            at += num_alike

    def missing(self, skip_tokens: int) -> tuple[int, range] | None:
        """Return the first layer and token range that adoption needs and that is not here; None if complete.

        Positions before `skip_tokens` are held already; those that a window layer can never see again are not needed.
        """
        lacking: dict[tuple[Ranges, int | None], range | None] = {}
        for layer, known in enumerate(zip(self._ranges, self._layout.windows, strict=True)):
            if known not in lacking:
                first = max(skip_tokens, self._layout.layers[layer].first_needed_token(self._num_tokens))
                lacking[known] = self._first_gap(known[0], first)
            if (gap := lacking[known]) is not None:
                return layer, gap
        return None

    def _first_gap(self, ranges: Ranges, at: int) -> range | None:
        """Return the first tokens from `at` on that are not in `ranges`."""
        for start, stop in ranges:
            if start <= at < stop:
                at = stop
        if at >= self._num_tokens:
            return None
        later = [start for start, _ in ranges if start > at]
        return range(at, min(later, default=self._num_tokens))


def _hits(ranges: Ranges, tokens: range) -> bool:
    at = bisect_left(ranges, (tokens.start, tokens.start))
    if at < len(ranges) and ranges[at][0] < tokens.stop:
        return True
    return at > 0 and ranges[at - 1][1] > tokens.start


def _joined(ranges: Ranges, tokens: range) -> Ranges:
    """Return `ranges` with `tokens`, which overlaps none of them."""
    first = last = bisect_left(ranges, (tokens.start, tokens.start))
    start, stop = tokens.start, tokens.stop
    if last < len(ranges) and ranges[last][0] == stop:
        stop = ranges[last][1]
        last += 1
    if first > 0 and ranges[first - 1][1] == start:
        first -= 1
        start = ranges[first][0]
    return (*ranges[:first], (start, stop), *ranges[last:])
