"""A node's part in an attempt, as the router tracks it: open until the node says `released` or its stream breaks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.build import Role
from pdserve.core.ids import Incarnation
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import LegOutcome
from pdserve.router.instructions import CancelLeg, LegAbandoned


class LegState(Enum):
    """Where a leg stands."""

    OPEN = "open"
    ENDED = "ended"
    RELEASED = "released"
    LOST = "lost"


class LegMove(Enum):
    """What happens to a leg."""

    END = "end"
    RELEASE = "release"
    LOSE = "lose"


LEG_TABLE = TransitionTable(
    name="router leg",
    initial=LegState.OPEN,
    terminal=frozenset({LegState.RELEASED, LegState.LOST}),
    moves={
        (LegState.OPEN, LegMove.END): LegState.ENDED,
        (LegState.OPEN, LegMove.RELEASE): LegState.RELEASED,
        (LegState.OPEN, LegMove.LOSE): LegState.LOST,
        (LegState.ENDED, LegMove.RELEASE): LegState.RELEASED,
        (LegState.ENDED, LegMove.LOSE): LegState.LOST,
    },
    ignored=frozenset(
        {(LegState.ENDED, LegMove.END)}
        | {(state, move) for state in (LegState.RELEASED, LegState.LOST) for move in LegMove}
    ),
)


@dataclass(slots=True)
class Leg:
    """One leg. `outcome` is set once the node said how it ended."""

    role: Role
    node: Incarnation
    attempt: int
    opened_s: float
    outcome: LegOutcome | None = None
    is_cancelled: bool = False
    life: LifeCycle[LegState, LegMove] = field(init=False)

    def __post_init__(self) -> None:
        self.life = LifeCycle(LEG_TABLE, f"{self.role.label}#{self.attempt}", self.opened_s)

    @property
    def is_closed(self) -> bool:
        """Whether nothing of the leg is left on the node, or the node is lost."""
        return self.life.is_terminal

    @property
    def is_running(self) -> bool:
        """Whether the node has neither ended nor released it."""
        return self.life.state is LegState.OPEN

    @property
    def did_its_part(self) -> bool:
        """Whether the node ended it well."""
        return self.outcome is LegOutcome.FINISHED


class Legs:
    """All legs of a session, of every attempt."""

    def __init__(self) -> None:
        self._legs: list[Leg] = []

    def __iter__(self) -> Iterator[Leg]:
        """Iterate over them in the order in which they were opened."""
        return iter(self._legs)

    @property
    def num_open(self) -> int:
        """Legs that are neither released nor lost."""
        return sum(not leg.is_closed for leg in self._legs)

    def open(self, role: Role, node: Incarnation, attempt: int, now_s: float) -> None:
        """Add the leg of an attempt."""
        self._legs.append(Leg(role, node, attempt, now_s))

    def find(self, node: Incarnation, attempt: int) -> Leg | None:
        """Return the leg that a node's event is about."""
        return next((leg for leg in self._legs if leg.node == node and leg.attempt == attempt), None)

    def are_closed(self, attempt: int) -> bool:
        """Whether nobody works on an attempt any more."""
        return all(leg.is_closed for leg in self._legs if leg.attempt == attempt)

    def lose(self, node: Incarnation, now_s: float) -> list[Leg]:
        """Close all legs on a node that is gone; return them."""
        lost = [leg for leg in self._legs if leg.node == node and not leg.is_closed]
        for leg in lost:
            leg.life.advance(LegMove.LOSE, now_s)
        return lost

    def cancel(self, reason: str) -> list[CancelLeg]:
        """Cancel what still runs; each leg is told once."""
        cancels = []
        for leg in self._legs:
            if leg.is_running and not leg.is_cancelled:
                leg.is_cancelled = True
                cancels.append(CancelLeg(leg.node, leg.attempt, reason))
        return cancels

    def cancel_sequences(self, attempt: int, sequences: tuple[int, ...], reason: str) -> list[CancelLeg]:
        """End some sequences of an attempt; its legs go on with the others."""
        running = [leg for leg in self._legs if leg.attempt == attempt and leg.is_running and not leg.is_cancelled]
        return [CancelLeg(leg.node, leg.attempt, reason, sequences) for leg in running]

    def abandon(self, now_s: float) -> list[LegAbandoned]:
        """Give up what was never released."""
        return [LegAbandoned(leg.node, leg.attempt) for leg in self._legs if leg.life.advance(LegMove.LOSE, now_s)]
