"""What a decode node remembers beside its live transfers: OPENs that came too early, and ids that are over."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.ids import Incarnation, TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.messages import Abort, Ack, Gone, Nack, Open


@dataclass(slots=True)
class ParkedOpen:
    """An OPEN whose submit has not come, and the ABORT that followed it, if one did."""

    route: Route
    message: Open
    came_s: float
    until_s: float
    abort: Abort | None = None


class ParkedOpens:
    """OPENs that overtook their submit: bounded in number, each for a fixed time, so the oldest expires first."""

    def __init__(self, max_parked: int, park_s: float) -> None:
        self._max_parked = max_parked
        self._park_s = park_s
        self._parked: OrderedDict[TransferId, ParkedOpen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def transfer_ids(self) -> tuple[TransferId, ...]:
        """Ids of all that are parked, oldest first."""
        return tuple(self._parked)

    def park(self, message: Open, route: Route, now_s: float) -> bool:
        """Keep `message`; False if there is no room. A repeated one keeps its first deadline."""
        if message.transfer_id in self._parked:
            return True
        if len(self._parked) >= self._max_parked:
            return False
        self._parked[message.transfer_id] = ParkedOpen(route, message, now_s, now_s + self._park_s)
        return True

    def get(self, transfer_id: TransferId) -> ParkedOpen | None:
        """Return the parked OPEN of this id without removing it."""
        return self._parked.get(transfer_id)

    def take(self, transfer_id: TransferId) -> ParkedOpen | None:
        """Remove and return the parked OPEN of this id."""
        return self._parked.pop(transfer_id, None)

    def drop_route(self, route: Route) -> None:
        """Forget what came on a route that is gone."""
        for transfer_id in [key for key, parked in self._parked.items() if parked.route == route]:
            del self._parked[transfer_id]

    def clear(self) -> None:
        """Forget everything."""
        self._parked.clear()

    def next_s(self) -> float | None:
        """Return when the oldest expires."""
        return next((parked.until_s for parked in self._parked.values()), None)

    def expire(self, now_s: float, gone: Callable[[ParkedOpen], None]) -> None:
        """Hand all whose time is up to `gone`."""
        while self._parked:
            transfer_id, parked = next(iter(self._parked.items()))
            if parked.until_s > now_s:
                return
            del self._parked[transfer_id]
            gone(parked)


@dataclass(slots=True)
class Tombstone:
    """An ended transfer: the answer that its sender gets to a repeated OPEN or COMMIT."""

    peer: Incarnation
    answer: Ack | Nack | Abort | Gone
    until_s: float
    num_late: int = 0


class Tombstones:
    """Ended ids, bounded in time and number; the oldest go first. Safe to forget: only a submit creates a transfer."""

    def __init__(self, max_tombstones: int, keep_s: float) -> None:
        self._max_tombstones = max_tombstones
        self._keep_s = keep_s
        self._graves: OrderedDict[TransferId, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def add(self, transfer_id: TransferId, peer: Incarnation, answer: Ack | Nack | Abort | Gone, now_s: float) -> None:
        """Remember how `transfer_id`, sent by `peer`, ended."""
        self._graves[transfer_id] = Tombstone(peer, answer, now_s + self._keep_s)
        while len(self._graves) > self._max_tombstones:
            self._graves.popitem(last=False)

    def get(self, transfer_id: TransferId, now_s: float) -> Tombstone | None:
        """Return what is remembered of `transfer_id`; forget all whose time is up."""
        while self._graves:
            oldest = next(iter(self._graves))
            if self._graves[oldest].until_s > now_s:
                break
            del self._graves[oldest]
        return self._graves.get(transfer_id)
