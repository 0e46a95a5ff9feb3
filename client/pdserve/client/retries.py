"""When a call is tried again: sans-IO, time and chance are passed in.

An error is tried again only if it says when (`retry_after_s`: the router's RetryInfo, or a connection that was refused), only if
nothing of the answer was delivered, and only within a number of tries and a total time.
"""

from dataclasses import dataclass

from pdserve.core.errors import PdserveError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and for how long. `max_total_s` bounds the time from the call to the start of its last try, seconds.

    The pause before try k + 1 is the larger of what the error asks for and `first_pause_s` · 2^(k-1), and up to `jitter` times
    that more, by chance, so that those who were refused together do not come back together.
    """

    max_tries: int = 4
    max_total_s: float = 30.0
    first_pause_s: float = 0.1
    jitter: float = 0.5


NO_RETRIES = RetryPolicy(max_tries=1)


class Tries:
    """The tries of one call. `timeout_s` is the call's whole time, or None."""

    def __init__(self, policy: RetryPolicy, began_s: float, timeout_s: float | None) -> None:
        self._policy, self._began_s, self._timeout_s = policy, began_s, timeout_s
        self.num_failed = 0

    def elapsed_s(self, now_s: float) -> float:
        """Return the seconds since the call was made."""
        return now_s - self._began_s

    def remaining_s(self, now_s: float) -> float | None:
        """Return the deadline of a try that starts now, seconds; None if the call has none."""
        return None if self._timeout_s is None else max(0.0, self._timeout_s - self.elapsed_s(now_s))

    def pause_s(self, error: PdserveError, now_s: float, chance: float) -> float | None:
        """Return how long to pause after a failed try, or None if there is no other. `chance` is in [0, 1)."""
        self.num_failed += 1
        if error.retry_after_s is None or self.num_failed >= self._policy.max_tries:
            return None
        wanted_s = max(error.retry_after_s, self._policy.first_pause_s * 2 ** (self.num_failed - 1))
        pause_s = wanted_s * (1 + self._policy.jitter * chance)
        bound_s = min(self._policy.max_total_s, self._timeout_s or self._policy.max_total_s)
        return pause_s if self.elapsed_s(now_s) + pause_s < bound_s else None
