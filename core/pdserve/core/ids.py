"""Typed ids. All random ids are 128 bits from the operating system and travel as 16 bytes."""

import secrets
from dataclasses import dataclass
from typing import NewType

Incarnation = NewType("Incarnation", bytes)
"""One run of a process. A restarted process is a new peer, also at the same address."""

TransferId = NewType("TransferId", bytes)
"""One attempt's movement of KV; made by the router."""

ID_BYTES = 16


def new_incarnation() -> Incarnation:
    """Draw the id of this run of the process."""
    return Incarnation(secrets.token_bytes(ID_BYTES))


def new_transfer_id() -> TransferId:
    """Draw the id of a transfer."""
    return TransferId(secrets.token_bytes(ID_BYTES))


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """A session as a node knows it: the router's incarnation and the router's own number."""

    router: Incarnation
    session_id: int


@dataclass(frozen=True, slots=True, order=True)
class LegKey:
    """A node's part in one attempt of a session."""

    session: SessionKey
    attempt: int

    def __str__(self) -> str:
        """Return the form that stands in logs: router prefix, session, attempt."""
        return f"{self.session.router.hex()[:8]}/{self.session.session_id}#{self.attempt}"
