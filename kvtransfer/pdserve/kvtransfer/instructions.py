"""What the transfer machines tell the shell to do. The shell carries them out in order, before the next event."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.core.ids import Incarnation, TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.messages import Message

EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to this peer and report the route with `dialled`."""

    peer: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class Trust:
    """The peer at the end of this route, which was dialled, has proven itself."""

    route: Route


@dataclass(frozen=True, slots=True)
class HangUp:
    """Drop this route."""

    route: Route


@dataclass(frozen=True, slots=True)
class Send:
    """Send this control message."""

    route: Route
    message: Message


@dataclass(frozen=True, slots=True)
class Place:
    """Put a verified payload into the pool and report with `placed` or `place_failed`."""

    transfer_id: TransferId
    layers: range
    tokens: range
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Emit(Generic[EventT]):
    """Tell the node."""

    event: EventT
