"""Time as a parameter: a monotonic clock that tests can hold still."""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary origin; never decreases."""
        ...


class SystemClock:
    """The operating system's monotonic clock."""

    def now_s(self) -> float:
        """Return `time.monotonic()`, seconds."""
        return time.monotonic()


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told to."""

    time_s: float = 0.0

    def now_s(self) -> float:
        """Return the time it was set to, seconds."""
        return self.time_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError("a monotonic clock never goes back")
        self.time_s += seconds
