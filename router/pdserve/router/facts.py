"""What does not change during a session."""

from dataclasses import dataclass

from pdserve.core.api_keys import ANYONE, Caller


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session's number, prompt and bounds. Times are on the router's monotonic clock."""

    session_id: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    received_s: float
    deadline_s: float | None
    prompt_logprobs: bool = False
    caller: Caller = ANYONE
    """Who asked: what salts, quotas and metrics go by."""
