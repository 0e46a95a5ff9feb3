"""Which layers and tokens of a transfer have arrived: disjoint ranges, not a count."""

from bisect import bisect_left

from pdserve.core.layout import KvLayout


class Coverage:
    """Disjoint token ranges per layer, merged where they touch. All heads of a layer travel together."""

    def __init__(self, layout: KvLayout, num_tokens: int) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in layout.layers]

    def overlaps(self, layers: range, tokens: range) -> bool:
        """Whether any layer holds any of the tokens already."""
        return any(self._hits(self._ranges[layer], tokens) for layer in layers)

    def add(self, layers: range, tokens: range) -> None:
        """Add a range that overlaps nothing."""
        for layer in layers:
            ranges = self._ranges[layer]
            at = bisect_left(ranges, (tokens.start, tokens.start))
            start, stop = tokens.start, tokens.stop
            if at < len(ranges) and ranges[at][0] == stop:
                stop = ranges.pop(at)[1]
            if at > 0 and ranges[at - 1][1] == start:
                at -= 1
                start = ranges.pop(at)[0]
            ranges.insert(at, (start, stop))

    def missing(self, skip_tokens: int) -> tuple[int, range] | None:
        """Return the first layer and token range that adoption needs and that is not here; None if complete.

        Positions before `skip_tokens` are held already; those that a window layer can never see again are not needed.
        """
        for layer, shape in enumerate(self._layout.layers):
            at = max(skip_tokens, shape.first_needed_token(self._num_tokens))
            for start, stop in self._ranges[layer]:
                if start <= at < stop:
                    at = stop
            if at < self._num_tokens:
                later = [start for start, _ in self._ranges[layer] if start > at]
                return layer, range(at, min(later, default=self._num_tokens))
        return None

    @staticmethod
    def _hits(ranges: list[tuple[int, int]], tokens: range) -> bool:
        at = bisect_left(ranges, (tokens.start, tokens.start))
        if at < len(ranges) and ranges[at][0] < tokens.stop:
            return True
        return at > 0 and ranges[at - 1][1] > tokens.start
