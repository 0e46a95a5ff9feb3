"""What nodes report of a session's legs, put where it belongs in the session's timeline."""

from pdserve.core.build import Role
from pdserve.router.events import Adopted, FirstToken, LegReleased
from pdserve.router.timeline import StageName, TimelineRecorder


class Reports:
    """Sorts durations into stages and beside them, and keeps how much of the prompt was cached."""

    def __init__(self, timeline: TimelineRecorder) -> None:
        self._timeline = timeline
        self._handover_names: frozenset[str] = frozenset()
        self.num_cached_tokens: int | None = None

    def placed(self) -> None:
        """Begin a new attempt."""
        self._handover_names = frozenset()

    def first_token(self, event: FirstToken, num_prompt_tokens: int) -> None:
        """Take the prefill node's report. The first one counts: what a resume finds cached was computed for this request."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(event.num_cached_tokens, num_prompt_tokens)
        self._timeline.nest(StageName.PREFILL, event.attempt, event.durations_s)

    def adopted(self, event: Adopted) -> None:
        """Take the decode node's report of the hand-over."""
        self._handover_names = frozenset(event.durations_s)
        self._timeline.nest(StageName.HANDOVER, event.attempt, event.durations_s)
        self._timeline.overlap(event.durations_s)

    def released(self, event: LegReleased, role: Role) -> None:
        """Take a leg's last report; it repeats what was said of the hand-over."""
        own = {name: value for name, value in event.durations_s.items() if name not in self._handover_names}
        self._timeline.overlap(own, event.kv_bytes, event.kv_frames)
        if role is Role.DECODE:
            self._timeline.nest(StageName.DECODE, event.attempt, own)
