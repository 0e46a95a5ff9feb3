"""The session machine under every order of events: exhaustively when short, at random when long (failure class 3)."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.build import Role
from pdserve.core.errors import SlowReader
from pdserve.core.work import LegOutcome
from pdserve.router.events import Aborted, ClientLeft, Placed, Submitted, Tick
from pdserve.router.instructions import Answer, Fail
from tests.router.session_world import NODES, World

P, D = NODES[Role.PREFILL][0], NODES[Role.DECODE][0]
OUTCOMES = (LegOutcome.FINISHED, LegOutcome.FAILED, LegOutcome.BUSY, LegOutcome.REFUSED)


Action = Callable[[World], object]


def say_first(attempt: int, world: World) -> None:
    world.first(attempt)


def say_adopted(attempt: int, world: World) -> None:
    world.adopted(attempt)


def say_token(index: int, attempt: int, world: World) -> None:
    world.tokens(index, attempt=attempt)


def say_released(who: str, attempt: int, world: World) -> None:
    world.released(who, attempt)


def say_lost(who: str, attempt: int, world: World) -> None:
    world.lost(who, attempt)


def say_ended(who: str, outcome: LegOutcome, attempt: int, world: World) -> None:
    world.ended(who, outcome, attempt)


def alphabet() -> dict[str, Action]:
    """Everything that the world may say, of attempts 1 and 2, at any time and in any order."""
    events: dict[str, Action] = {
        "place": lambda w: w.place(w.session.attempt % 2) if w.asked else None,
        "place again": lambda w: None if w.asked else w.tell(Placed(P, D, "identity", frozenset())),
        "submitted": lambda w: w.tell(Submitted(1)),
        "leave": lambda w: w.tell(ClientLeft()),
        "slow": lambda w: w.tell(Aborted(SlowReader("slow"))),
        "tick": lambda w: w.tell(Tick()),
        "late tick": lambda w: w.wait(31.0),
    }
    for attempt in (1, 2):
        events[f"first#{attempt}"] = partial(say_first, attempt)
        events[f"adopted#{attempt}"] = partial(say_adopted, attempt)
        events[f"token1#{attempt}"] = partial(say_token, 1, attempt)
        events[f"token2#{attempt}"] = partial(say_token, 2, attempt)
        for who in "PD":
            events[f"released {who}#{attempt}"] = partial(say_released, who, attempt)
            events[f"lost {who}#{attempt}"] = partial(say_lost, who, attempt)
            for outcome in OUTCOMES:
                events[f"{outcome.name} {who}#{attempt}"] = partial(say_ended, who, outcome, attempt)
    return events


EVENTS = alphabet()
STARTS = {
    (): 4,
    ("place", "first#1"): 3,
    ("place", "adopted#1"): 3,
    ("place", "adopted#1", "lost D#1", "place"): 3,
}
"""Where exploration begins, and how many events deep it goes from there."""


def fingerprint(world: World) -> tuple[object, ...]:
    session = world.session
    legs = tuple((leg.role, leg.attempt, leg.life.state, leg.outcome, leg.is_cancelled) for leg in session.legs)
    asked = world.asked is not None
    early = tuple(sorted(session.sequences[0]._early))
    tokens = session.sequences.num_tokens
    ends = (world.is_over, session.is_answered, world.is_closed)
    return (session.state, session.attempt, legs, asked, early, tokens, ends, session.patience.num_failures)


def close(world: World) -> None:
    """Let every node answer, and time pass: the session must end with one answer and leave."""
    for attempt in range(1, world.session.attempt + 1):
        for who in "PD":
            world.released(who, attempt)
    world.now_s += 100.0
    world.tell(Tick())
    for attempt in range(1, world.session.attempt + 1):
        for who in "PD":
            world.released(who, attempt)
    assert world.is_closed, world.session.life.tell()
    assert world.is_client_gone or any(isinstance(entry, Answer | Fail) for entry in world.log)


def replayed(names: tuple[str, ...]) -> World:
    """Return a world in which these events happened (much cheaper than copying one)."""
    world = World()
    for name in names:
        EVENTS[name](world)
    return world


@pytest.mark.parametrize("start", STARTS, ids=lambda start: " ".join(start) or "begin")
def test_every_order_of_events_ends_well(start: tuple[str, ...]) -> None:
    """All orders of events from each start, to the depth stated there, equal states merged.

    Never raises, one answer, tokens once and in order, every leg closed.
    """
    seen: set[tuple[object, ...]] = set()
    layer = [start]
    for _ in range(STARTS[start]):
        following = []
        for path in layer:
            for name in EVENTS:
                world = replayed((*path, name))
                mark = fingerprint(world)
                if mark not in seen and not world.is_closed:
                    seen.add(mark)
                    following.append((*path, name))
                    close(world)
        layer = following
    assert len(seen) > 150, "the exploration must reach something"


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=40), st.sampled_from([1, 2, 3]))
@settings(max_examples=400, deadline=None)
def test_long_random_orders_end_well(names: list[str], max_tokens: int) -> None:
    world = World(max_tokens=max_tokens)
    for name in names:
        if world.is_closed:
            break
        if max_tokens < 3 and name.startswith("token2"):
            continue
        EVENTS[name](world)
    if not world.is_closed:
        close(world)
