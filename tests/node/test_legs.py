"""A leg ends once, is released once and last, and answers for itself afterwards."""

import pytest

from pdserve.core.clock import ManualClock
from pdserve.core.errors import InternalError
from pdserve.core.ids import Incarnation
from pdserve.core.work import LegOutcome
from pdserve.node import legs as legs_module
from pdserve.node.legs import TOMBSTONE_S, Legs
from tests.node.works import ROUTER, leg


def events(legs: Legs) -> list[str]:
    """Drain the outbox of the only router; the kinds of the events."""
    outbox = legs._outboxes[ROUTER]
    kinds = []
    while (message := outbox.take()) is not None:
        kinds += [str(event.WhichOneof("event")) for event in message.events]
    return kinds


@pytest.fixture
def legs() -> Legs:
    told: list[Incarnation] = []
    made = Legs(ManualClock(), told.append)
    made.attach(ROUTER)
    return made


def test_the_first_end_counts_and_release_is_last(legs: Legs) -> None:
    assert legs.open(leg(1))
    assert legs.end(leg(1), LegOutcome.FINISHED, "finished")
    assert not legs.end(leg(1), LegOutcome.FAILED, "late")
    legs.release(leg(1), {"decode.compute": 1.0})
    assert events(legs) == ["ended", "released"]
    assert legs.num_open == 0


def test_release_without_an_end_is_our_fault(legs: Legs) -> None:
    legs.open(leg(1))
    with pytest.raises(InternalError, match="RELEASE in OPEN"):
        legs.release(leg(1))


def test_a_repeated_submit_is_answered_not_run_again(legs: Legs) -> None:
    legs.open(leg(1))
    assert not legs.open(leg(1))
    legs.refuse(leg(1), LegOutcome.BUSY, "queue_full")
    assert not legs.open(leg(1))
    assert events(legs) == ["ended", "released", "released"]


def test_cancel_of_an_unknown_leg_is_answered(legs: Legs) -> None:
    legs.tell_released(leg(9))
    assert events(legs) == ["released"]


def test_tombstones_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs_module, "MAX_TOMBSTONES", 20)
    clock = ManualClock()
    legs = Legs(clock, lambda _router: None)
    for number in range(30):
        legs.open(leg(number))
        legs.refuse(leg(number), LegOutcome.BUSY, "queue_full")
    assert len(legs._over) == 20
    clock.advance(TOMBSTONE_S + 1)
    legs.open(leg(-1 % 2**32))
    legs.refuse(leg(-1 % 2**32), LegOutcome.BUSY, "queue_full")
    assert len(legs._over) == 1


def test_a_detached_router_hears_nothing_and_its_legs_are_named(legs: Legs) -> None:
    legs.open(leg(1))
    assert legs.detach(ROUTER) == [leg(1)]
    legs.end(leg(1), LegOutcome.CANCELLED, "router lost")
    legs.release(leg(1))
    assert legs.num_open == 0
    assert legs.pending_bytes() == 0
