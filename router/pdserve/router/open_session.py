"""One open session with what its shell needs, and what operators are shown of it."""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.core.build import ProcessInfo
from pdserve.router.events import Event
from pdserve.router.family import Family
from pdserve.router.journal import Journal
from pdserve.router.lifecycle import SessionState
from pdserve.router.mailbox import Mailbox
from pdserve.router.pb import SessionRow
from pdserve.router.request import ValidRequest
from pdserve.router.session import Session


@dataclass
class OpenSession:
    """A session with what its shell needs: the request, the client's mailbox, the timer, events that wait their turn.

    Sessions of one family share the request and the mailbox. The first of them is the one that the front holds.
    """

    request: ValidRequest
    session: Session
    family: Family
    mailbox: Mailbox
    journal: Journal
    submitted_to: tuple[ProcessInfo, ...] = ()
    """The nodes of the session's last attempt, as they were when it was submitted."""
    timer: asyncio.TimerHandle | None = None
    due_s: float | None = None
    events: deque[Event] = field(default_factory=deque)
    is_handling: bool = False

    @property
    def session_id(self) -> int:
        """The router's number of the session."""
        return self.session.facts.session_id

    @property
    def processes(self) -> tuple[ProcessInfo, ...]:
        """The nodes that the answer names: those of the part that ended last. Empty before the answer."""
        return self.family.processes

    def row(self, now_s: float) -> SessionRow:
        """Return the session as GetClusterState shows it."""
        return SessionRow(
            self.session_id,
            self.request.label,
            self.session.state.name,
            self.session.attempt,
            now_s - self.session.facts.received_s,
            self.session.sequences.num_tokens,
        )


def session_gauges(entries: Iterable[OpenSession]) -> dict[str, float]:
    """Return open sessions by state and what they hold."""
    entries = list(entries)
    mailboxes = {id(entry.mailbox): entry.mailbox for entry in entries}
    counts = {f"sessions.{state.value}": 0.0 for state in SessionState}
    for entry in entries:
        counts[f"sessions.{entry.session.state.value}"] += 1
    return counts | {
        "sessions": float(len(entries)),
        "legs_open": float(sum(entry.session.legs.num_open for entry in entries)),
        "mailbox_bytes": float(sum(mailbox.num_bytes for mailbox in mailboxes.values())),
    }
