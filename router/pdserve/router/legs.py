"""A node's part in an attempt, as the router tracks it: open until the node says `released` or its stream breaks."""

from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.build import Role
from pdserve.core.ids import Incarnation
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import LegOutcome


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
