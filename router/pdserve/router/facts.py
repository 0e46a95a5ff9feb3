"""What does not change during a session."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session's number, prompt and bounds. Times are on the router's monotonic clock."""

    session_id: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    received_s: float
    deadline_s: float | None
    prompt_logprobs: bool = False
