"""The sessions that answer one request: one, and those that a failure made its sequences fork off into. Sans-IO.

The client has one answer: it is complete when every session's part is, and it fails as a whole with the first part that fails.
"""

from dataclasses import replace

from pdserve.core.build import ProcessInfo
from pdserve.core.errors import PdserveError
from pdserve.router.instructions import Answer
from pdserve.router.lifecycle import SessionState
from pdserve.router.sequence import End
from pdserve.router.session import Session


class Family:
    """Brings the parts of an answer together."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.error: PdserveError | None = None
        self.processes: tuple[ProcessInfo, ...] = ()
        self.is_noted = False
        self._answers: dict[int, Answer] = {}

    def join(self, session: Session) -> None:
        """Add a session: the first, or one that was forked off."""
        self.sessions.append(session)

    @property
    def is_answered(self) -> bool:
        """Whether the client has its summary or error, or is gone."""
        return all(session.is_answered for session in self.sessions)

    @property
    def state(self) -> SessionState:
        """How the request ended; to be asked when it is answered."""
        states = {session.state for session in self.sessions}
        if self.error is not None or not all(session.life.is_terminal for session in self.sessions):
            return SessionState.FAILED
        return SessionState.CANCELLED if SessionState.CANCELLED in states else SessionState.FINISHED

    @property
    def num_shown_tokens(self) -> int:
        """Tokens of all sequences that the client was given."""
        return sum(session.sequences.num_shown_tokens for session in self.sessions)

    @property
    def ends(self) -> list[End]:
        """How each sequence ended, by index, as far as they have."""
        ends = {index: end for session in self.sessions for index, end in session.sequences.ends.items()}
        return [ends[index] for index in sorted(ends)]

    def answered(self, session: Session, answer: Answer) -> Answer | None:
        """Take the answer of a session. Return that of the request if this was the last part: its timeline is the answer's.

        A part that failed never answers, so the answer of a request that failed is never returned.
        """
        self._answers[session.facts.session_id] = answer
        if len(self._answers) < len(self.sessions):
            return None
        cached = [part.num_cached_tokens for part in self._answers.values() if part.num_cached_tokens is not None]
        return replace(
            answer,
            num_cached_tokens=min(cached, default=0),
            num_completion_tokens=sum(part.num_completion_tokens for part in self._answers.values()),
        )

    def failed(self, error: PdserveError) -> bool:
        """Take the failure of a session. Return whether it is the request's: the first counts."""
        if self.error is not None:
            return False
        error.metadata["num_tokens_sent"] = str(self.num_shown_tokens)
        self.error = error
        return True
