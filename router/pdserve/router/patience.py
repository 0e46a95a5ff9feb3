"""How long and how often a session tries: failures are counted, pauses are paced and bounded in time, refusals exclude a node.

Sans-IO; it holds what the session remembers of its earlier attempts.
"""

from dataclasses import dataclass

from pdserve.core.errors import AttemptsExhausted, InvalidRequest, NoNodes, Overloaded, PdserveError
from pdserve.core.ids import Incarnation
from pdserve.core.work import LegOutcome
from pdserve.router.events import LegEnded

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_DOUBLINGS = 8
NOT_FAILURES = frozenset({LegOutcome.BUSY, LegOutcome.EVICTED, LegOutcome.DRAINED, LegOutcome.REFUSED})


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds on what a session may wait for and try."""

    max_attempts: int
    queue_wait_s: float
    resume_wait_s: float


class Patience:
    """What earlier attempts taught, and what that means for the next one."""

    def __init__(self, limits: SessionLimits, now_s: float) -> None:
        self._limits = limits
        self.num_failures = 0
        self._num_pauses = 0
        self._waiting_since_s: float | None = now_s
        self._refusals: dict[Incarnation, LegEnded] = {}
        self.avoided: frozenset[Incarnation] = frozenset()
        """Nodes of failed attempts; others are better, if there are any."""
        self.last_cause = self._last_detail = ""

    def fork(self) -> "Patience":
        """Return a copy for a session that takes over some of the sequences: it has learnt, and waited, as much."""
        copy = Patience(self._limits, 0.0)
        copy.num_failures, copy._num_pauses = self.num_failures, self._num_pauses
        copy._waiting_since_s, copy._refusals = self._waiting_since_s, dict(self._refusals)
        copy.avoided = self.avoided
        copy.last_cause, copy._last_detail = self.last_cause, self._last_detail
        return copy

    @property
    def excluded(self) -> frozenset[Incarnation]:
        """Nodes that refused the request for good."""
        return frozenset(self._refusals)

    @property
    def is_exhausted(self) -> bool:
        """Whether all allowed attempts have failed."""
        return self.num_failures >= self._limits.max_attempts

    @property
    def told(self) -> str:
        """How the last attempt ended, for the log."""
        return f"{self.last_cause}: {self._last_detail}" if self._last_detail else self.last_cause

    @property
    def backoff_s(self) -> float:
        """Pause before the next attempt, seconds."""
        if not self._num_pauses:
            return 0.0
        return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._num_pauses - 1, MAX_DOUBLINGS))

    def wait_ends_s(self, *, is_resume: bool) -> float | None:
        """Return when a wait for nodes is over; None if nothing waits."""
        if self._waiting_since_s is None:
            return None
        return self._waiting_since_s + (self._limits.resume_wait_s if is_resume else self._limits.queue_wait_s)

    def progressed(self) -> None:
        """A token came: later pauses start afresh."""
        self._waiting_since_s, self._num_pauses = None, 0

    def refused(self, event: LegEnded) -> None:
        """A node can never serve the request."""
        self._refusals[event.node] = event

    def attempt_ended(
        self, outcome: LegOutcome, cause: str, now_s: float, detail: str, nodes: frozenset[Incarnation]
    ) -> None:
        """Count the end of an attempt on `nodes`. Only failures count towards the bound; the wait for other ends adds up.

        `cause` is a stable name, which clients are told; `detail` what is known besides, for operators.
        """
        self.last_cause, self._last_detail = cause, detail
        if outcome in NOT_FAILURES:
            self._num_pauses += outcome is not LegOutcome.REFUSED
            self._waiting_since_s = now_s if self._waiting_since_s is None else self._waiting_since_s
        else:
            self.num_failures += 1
            self.avoided |= nodes
            self._num_pauses = self.num_failures - 1
            self._waiting_since_s = now_s

    def exhausted_error(self) -> PdserveError:
        """Return the error after the last allowed attempt."""
        return AttemptsExhausted(
            f"{self.num_failures} attempts failed; the last: {self.last_cause}", operators_hint=self._last_detail
        )

    def refusal_error(self, error: PdserveError) -> PdserveError:
        """Return what the client is told when placement gives up: a node's own reason, if one refused."""
        if not self._refusals:
            return error
        last = list(self._refusals.values())[-1]
        return InvalidRequest(f"no node can serve this request: {last.detail or last.reason}", hint=last.reason)

    def wait_error(self) -> PdserveError:
        """Return the error after too long a wait for nodes."""
        if self.num_failures:
            return AttemptsExhausted(
                f"no node could take over in time; the last attempt: {self.last_cause}",
                operators_hint=self._last_detail,
            )
        waited = "no node became free in time"
        if self.last_cause.startswith("drain"):
            return NoNodes(waited, retry_after_s=1.0)
        return Overloaded(waited, retry_after_s=1.0, hint="come back later, or add nodes")
