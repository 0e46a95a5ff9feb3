"""The line of sessions that wait for nodes, and when it is gone through: the shell around `placement` and `WaitingLine`.

Everything runs on the event loop's thread and returns at once.
"""

import asyncio
from typing import Protocol

from pdserve.core.build import Role
from pdserve.core.clock import Clock
from pdserve.router.admission import WaitingLine
from pdserve.router.events import Placed, PlacementRefused
from pdserve.router.instructions import PlacementQuery
from pdserve.router.membership import Membership
from pdserve.router.nodes import NodeLoad
from pdserve.router.placement import Busy, Pair, PlacementPolicy, place

MIN_TIMER_S = 0.001
RESUMES_PER_NODE = 8
"""Sessions per prefill node that are computed anew at once: the loss of a full node must not flood the others."""


class Waiters(Protocol):
    """The sessions, as the line sees them."""

    def num_resuming(self) -> int:
        """Return how many are being computed anew."""
        ...

    def place(self, session_id: int, event: Placed | PlacementRefused) -> None:
        """Answer a session's question."""
        ...


class Placing:
    """Asks placement for every session in line, resumes first, whenever nodes may have become free."""

    def __init__(self, membership: Membership, policy: PlacementPolicy, clock: Clock, waiters: Waiters) -> None:
        self._membership, self._policy, self._clock, self._waiters = membership, policy, clock, waiters
        self._line = WaitingLine()
        self._timer: asyncio.TimerHandle | None = None
        self._is_pumping = False
        self._is_pump_due = False

    def __len__(self) -> int:
        """Number of waiting sessions."""
        return len(self._line)

    @property
    def num_new(self) -> int:
        """Waiting sessions that no node has served yet."""
        return self._line.num_new

    @property
    def session_ids(self) -> list[int]:
        """Numbers of those that wait."""
        return [query.session_id for query in self._line.all()]

    def ask(self, query: PlacementQuery) -> None:
        """Put a session's question into the line."""
        self._line.join(query)
        self.pump_soon()

    def withdraw(self, session_id: int) -> None:
        """Take a session out, if it waits."""
        self._line.leave(session_id)

    def pump_soon(self) -> None:
        """Pump once, however many events of this turn of the loop ask for it."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Place those that wait: resumes first, each by age."""
        if self._is_pumping:
            return
        self._is_pumping = True
        self._is_pump_due = False
        try:
            self._place_waiting()
        finally:
            self._is_pumping = False
        self._arm()

    def _place_waiting(self) -> None:
        loads = self._membership.loads()
        room = RESUMES_PER_NODE * sum(load.role is Role.PREFILL for load in loads) - self._waiters.num_resuming()
        for query in self._line.due(self._clock.now_s(), room):
            if self._try_place(query, loads):
                loads = self._membership.loads()

    def _try_place(self, query: PlacementQuery, loads: list[NodeLoad]) -> bool:
        """Answer a question if it can be answered now; return whether nodes were given work."""
        found = place(query, loads, self._policy)
        if isinstance(found, Busy):
            return False
        if isinstance(found, Pair):
            self._line.leave(query.session_id)
            eos = self._membership.eos_token_ids(found.prefill)
            self._waiters.place(query.session_id, Placed(found.prefill, found.decode, found.identity, eos))
            return True
        if found.is_final or not query.is_resume:
            self._line.leave(query.session_id)
            if not found.error.hint:
                found.error.operators_hint = self._membership.why_empty()
            self._waiters.place(query.session_id, PlacementRefused(found.error))
        return False

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = self._clock.now_s()
        due_s = self._line.next_due_s(now_s)
        if due_s is not None:
            delay_s = max(MIN_TIMER_S, due_s - now_s)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.pump)
