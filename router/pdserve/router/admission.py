"""Who may come in, and who waits for nodes. Pure and bounded: too many sessions or waiters are refused at once, with a time."""

from dataclasses import dataclass

from pdserve.core.errors import Draining, Overloaded
from pdserve.router.instructions import PlacementQuery

FIRST_INTERVAL_S = 0.25
SMOOTHING = 0.2
MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0


class Admission:
    """Counts open answers and waiting sessions against their bounds: a request of several answers may become as many sessions.

    A request alone is let in however many answers it asks for.
    `retry_after_s` is the length of the line times the smoothed time between two departures of one busy period.
    """

    def __init__(self, max_sessions: int, max_queue: int) -> None:
        self._max_sessions, self._max_queue = max_sessions, max_queue
        self._interval_s = FIRST_INTERVAL_S
        self._left_s: float | None = None
        self.num_open = 0
        self.num_refused = 0
        self.is_draining = False

    def admit(self, num_waiting: int, num_sequences: int = 1) -> None:
        """Let one request in. Raises Draining or Overloaded."""
        if self.is_draining:
            raise Draining("the router takes no new work", hint="send the request to another router", retry_after_s=1.0)
        if self.num_open and self.num_open + num_sequences > self._max_sessions:
            self._refuse(f"{self.num_open} answers are open", num_waiting)
        if num_waiting >= self._max_queue:
            self._refuse(f"{num_waiting} requests wait for nodes", num_waiting)
        self.num_open += num_sequences

    def leave(self, now_s: float, num_sequences: int = 1) -> None:
        """Let one request out, with all its sequences."""
        if self.num_open < num_sequences:
            raise ValueError("more requests left than came")
        self.num_open -= num_sequences
        if self._left_s is not None:
            self._interval_s += SMOOTHING * (now_s - self._left_s - self._interval_s)
        # An idle hour says nothing of how fast requests leave.
        self._left_s = now_s if self.num_open else None

    def _refuse(self, why: str, num_waiting: int) -> None:
        self.num_refused += 1
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, self._interval_s * (num_waiting + 1)))
        raise Overloaded(f"the router is full: {why}", hint=f"retry in {retry_s:.1f} s", retry_after_s=retry_s)


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    is_new: bool
    arrived_s: float
    session_id: int


class WaitingLine:
    """Sessions that wait for nodes: resumes ahead of new work, each by original age.

    Its length is bounded by the sessions that admission lets in.
    """

    def __init__(self) -> None:
        self._queries: dict[int, PlacementQuery] = {}

    def __len__(self) -> int:
        """Number of waiting sessions."""
        return len(self._queries)

    @property
    def num_new(self) -> int:
        """Waiting sessions that no node has served yet."""
        return sum(not query.is_resume for query in self._queries.values())

    def join(self, query: PlacementQuery) -> None:
        """Add a session, or replace what it asked before."""
        self._queries[query.session_id] = query

    def leave(self, session_id: int) -> None:
        """Take a session out, if it waits."""
        self._queries.pop(session_id, None)

    def all(self) -> list[PlacementQuery]:
        """Return every question, in no particular order."""
        return list(self._queries.values())

    def due(self, now_s: float, max_resumes: int) -> list[PlacementQuery]:
        """Return the questions that may be answered now, in their order: at most `max_resumes` resumes, then new work."""
        ready = [query for query in self._queries.values() if query.not_before_s <= now_s]
        ready.sort(key=lambda query: _Place(not query.is_resume, query.arrived_s, query.session_id))
        resumes = [query for query in ready if query.is_resume]
        return resumes[: max(0, max_resumes)] + [query for query in ready if not query.is_resume]

    def next_due_s(self, now_s: float) -> float | None:
        """Return when the next pause ends, or None if nobody pauses."""
        return min((q.not_before_s for q in self._queries.values() if q.not_before_s > now_s), default=None)
