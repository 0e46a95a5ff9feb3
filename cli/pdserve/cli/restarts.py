"""When a process that died is started again, and when there is no point in it."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class RestartPolicy:
    """Restarts with doubling delays, and at most `max_restarts` within `window_s`. Time is passed in."""

    max_restarts: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 8.0
    _times_s: deque[float] = field(default_factory=deque)

    def next_delay_s(self, now_s: float) -> float | None:
        """Take note of a death at `now_s`. Return how long to wait before the restart, or None to give up."""
        while self._times_s and now_s - self._times_s[0] > self.window_s:
            self._times_s.popleft()
        if len(self._times_s) >= self.max_restarts:
            return None
        self._times_s.append(now_s)
        delay_s = self.first_delay_s * 2.0 ** (len(self._times_s) - 1)
        return min(delay_s, self.longest_delay_s)
