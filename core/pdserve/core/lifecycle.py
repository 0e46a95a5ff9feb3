"""One enum and one transition table per life cycle.

A table maps (state, event) to the next state. A pair that the table lists as `IGNORED` is a late, duplicate or reordered
event: normal, counted, and without effect. A pair that stands nowhere is a fault of ours and raises with the whole story.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from pdserve.core.errors import InternalError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

STORY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class TransitionTable(Generic[S, E]):
    """The moves of one life cycle.

    `moves` are those that change something; `ignored` are those that the world may cause at any time without effect.
    """

    name: str
    initial: S
    terminal: frozenset[S]
    moves: Mapping[tuple[S, E], S]
    ignored: frozenset[tuple[S, E]] = frozenset()

    def __post_init__(self) -> None:
        both = self.ignored & self.moves.keys()
        if both:
            raise ValueError(f"{self.name}: listed as a move and as ignored: {sorted(map(str, both))}")

    def missing(self) -> list[tuple[S, E]]:
        """Return the (state, event) pairs that the table does not answer; a complete table returns none."""
        states: Iterable[S] = type(self.initial)
        events: Iterable[E] = type(next(iter(self.moves))[1])
        answered = self.moves.keys() | self.ignored
        return [(state, event) for state in states for event in events if (state, event) not in answered]


@dataclass(slots=True)
class LifeCycle(Generic[S, E]):
    """Where one thing stands in its table, since when, and how it came there."""

    table: TransitionTable[S, E]
    subject: str
    entered_s: float
    state: S = field(init=False)
    num_ignored: int = 0
    story: deque[tuple[float, S, E]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    def __post_init__(self) -> None:
        self.state = self.table.initial

    @property
    def is_terminal(self) -> bool:
        """Whether no further move is possible."""
        return self.state in self.table.terminal

    def advance(self, event: E, now_s: float) -> bool:
        """Take `event`. Return True if it moved, False if the table ignores it here; raise InternalError otherwise."""
        key = (self.state, event)
        following = self.table.moves.get(key)
        if following is None:
            if key in self.table.ignored:
                self.num_ignored += 1
                return False
            raise InternalError(f"{self.table.name} {self.subject}: {event.name} in {self.state.name}; {self.tell()}")
        self.story.append((now_s, self.state, event))
        if following is not self.state:
            self.entered_s = now_s
        self.state = following
        return True

    def age_s(self, now_s: float) -> float:
        """Return seconds since the present state was entered."""
        return now_s - self.entered_s

    def tell(self) -> str:
        """Return the last moves as one line."""
        moves = ", ".join(f"{state.name} -{event.name}→" for _, state, event in self.story)
        return f"story: {moves} {self.state.name}"
