"""Which ready layers and tokens go into the next DATA frame.

As each layer of a chunk is computed its range becomes ready. Consecutive layers of the same tokens share a frame until it
reaches `FILL_BYTES`; no frame is longer than `MAX_FRAME_BYTES`.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from pdserve.core.layout import KvLayout
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES

FILL_BYTES = 256 << 10
"""A frame waits for more layers until it is this long."""


@dataclass(frozen=True, slots=True)
class FrameRange:
    """The content of one DATA frame: every listed layer of every listed token."""

    layers: range
    tokens: range
    num_bytes: int


class FramePlanner:
    """Ready ranges of one transfer, cut into frames in the order in which they became ready."""

    def __init__(self, layout: KvLayout, num_tokens: int) -> None:
        self._layout = layout
        self._num_tokens = num_tokens
        self._skip_tokens = 0
        self._segments: deque[tuple[range, range]] = deque()
        self._marked: deque[tuple[range, range]] = deque()
        """All that became ready, taken or not."""
        self._closed = False
        self._next: FrameRange | None = None
        self._is_next_known = True
        """Whether `_next` is what `peek` returns: it is asked for often, and changes seldom."""

    @property
    def is_empty(self) -> bool:
        """Whether everything that became ready was taken."""
        return not self._segments

    def mark_ready(self, layers: range, tokens: range) -> bool:
        """Add a range; return False if it lies outside the transfer or is no plain range."""
        inside = 0 <= layers.start < layers.stop <= self._layout.num_layers
        inside = inside and 0 <= tokens.start < tokens.stop <= self._num_tokens
        if not inside or layers.step != 1 or tokens.step != 1:
            return False
        _append(self._marked, layers, tokens)
        self._append(layers, tokens)
        return True

    def rewind(self) -> None:
        """Plan all that became ready anew, as if nothing had been taken or skipped."""
        self._skip_tokens = 0
        self._segments = self._marked.copy()
        self._is_next_known = False

    def skip(self, num_tokens: int) -> None:
        """Leave out the first `num_tokens` positions, of ranges already ready too."""
        self._skip_tokens = num_tokens
        self._is_next_known = False
        waiting, self._segments = self._segments, deque()
        for layers, tokens in waiting:
            self._append(layers, tokens)

    def close(self) -> None:
        """No more will become ready: short frames need not wait any longer."""
        self._closed = True
        self._is_next_known = False

    def peek(self) -> FrameRange | None:
        """Return the next frame, or None if nothing is ready or the frame may still grow."""
        if not self._is_next_known:
            self._next, self._is_next_known = self._plan(), True
        return self._next

    def take(self, frame: FrameRange) -> None:
        """Remove what `peek` returned."""
        self._is_next_known = False
        layers, tokens = self._segments.popleft()
        if frame.layers.stop < layers.stop:
            self._segments.appendleft((range(frame.layers.stop, layers.stop), tokens))
        if frame.tokens.stop < tokens.stop:
            self._segments.appendleft((frame.layers, range(frame.tokens.stop, tokens.stop)))

    def clear(self) -> None:
        """Forget everything."""
        self._is_next_known = False
        self._segments.clear()
        self._marked.clear()

    def _plan(self) -> FrameRange | None:
        if not self._segments:
            return None
        layers, tokens = self._segments[0]
        # A frame cannot grow once other tokens follow it, or its last layer is the model's last.
        is_final = self._closed or len(self._segments) > 1 or layers.stop == self._layout.num_layers
        if not is_final and self._layout.range_bytes(layers, len(tokens)) < FILL_BYTES:
            return None
        return self._cut(layers, tokens)

    def _append(self, layers: range, tokens: range) -> None:
        tokens = range(max(tokens.start, self._skip_tokens), tokens.stop)
        if tokens:
            self._is_next_known = False
            _append(self._segments, layers, tokens)

    def _cut(self, layers: range, tokens: range) -> FrameRange:
        """Return the longest leading part that fits: whole layers, or some tokens of the first layer."""
        before = self._layout.bytes_before
        fits = before[layers.start] + MAX_FRAME_BYTES // len(tokens)
        whole = range(layers.start, min(layers.stop, bisect_right(before, fits) - 1))
        if whole:
            return FrameRange(whole, tokens, self._layout.range_bytes(whole, len(tokens)))
        per_token = self._layout.layer_token_bytes(layers.start)
        fitting = range(tokens.start, tokens.start + MAX_FRAME_BYTES // per_token)
        return FrameRange(range(layers.start, layers.start + 1), fitting, len(fitting) * per_token)


def _append(segments: deque[tuple[range, range]], layers: range, tokens: range) -> None:
    """Add a range; the next layers of the same tokens become part of the last one."""
    if segments:
        last_layers, last_tokens = segments[-1]
        if last_tokens == tokens and last_layers.stop == layers.start:
            segments[-1] = (range(last_layers.start, layers.stop), tokens)
            return
    segments.append((layers, tokens))
