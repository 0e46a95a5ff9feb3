"""Every order of events of the model, to a stated depth.

From each state every enabled action is tried; states that differ in nothing that can matter later are visited once. Node actions
are free, faults come from budgets. At the depth's border, and where a run has nothing left to do, the nodes fall silent, the
network delivers, and time passes: everything must end within its deadlines, with all places free. No move leads back to where
it began, so every run of the scenario comes to one of those.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.kvtransfer.messages import Challenge, Hello, Message, Welcome
from pdserve.kvtransfer.sender_link import LinkState
from tests.kvtransfer.model import Model, thaw
from tests.kvtransfer.model_parts import NUM_TOKENS, RECEIVER, SENDER, Action, Broken, Plan

MOST_STEPS_TO_END = 400


@dataclass(frozen=True)
class Scenario:
    """What may happen, and how often. `faults` are kinds from `Model`; `num_faults` is how many of them together."""

    name: str
    plans: tuple[Plan, ...] = (Plan(0),)
    depth: int = 100
    faults: tuple[str, ...] = ()
    num_faults: int = 0
    num_aborts: int = 0
    num_repeats: int = 0
    """Submits that come twice."""
    num_cuts: int = 0
    redials: bool = False
    """Whether a lost connection is dialled again at any time, without any other deadline that passes; then, too, what was under
    way to the decode node may arrive after the break, beside the next connection."""
    num_restarts: int = 0
    num_times: int = 0
    """Deadlines that pass while messages are still under way."""
    beats_only: bool = False
    """Whether faults meet nothing but BEATs."""
    must_succeed: bool = False
    """Whether every run without an end by a node has to end in ACK."""
    window_bytes: int = 1 << 20
    has_secret: bool = False
    skip_tokens: int = 0
    wire_dtype: str = ""
    holds_falsely: bool = False
    is_met: bool = True
    """Whether it begins after the handshake; if not, the router names each node to the other at any time."""


@dataclass
class Found:
    """What a search saw."""

    num_states: int = 0
    num_moves: int = 0
    num_ends: int = 0
    """Runs that were led to their end."""
    is_whole: bool = True
    """Whether the depth left nothing out."""
    outcomes: set[tuple[str, ...]] = field(default_factory=set)
    """What nodes were told in the runs that ended, by kind."""

    def __str__(self) -> str:
        whole = "whole" if self.is_whole else "cut at its depth"
        return f"{self.num_states} states, {self.num_moves} moves, {self.num_ends} ends, {whole}"


Budget = tuple[tuple[str, int], ...]


def search(scenario: Scenario) -> Found:
    """Visit all states of `scenario`; raise Broken, with the shortest way to it, at the first that breaks a rule."""
    found = Found()
    named = {SENDER, RECEIVER} if scenario.is_met else set[str]()
    start = Model(
        scenario.plans,
        scenario.window_bytes,
        scenario.has_secret,
        scenario.skip_tokens,
        scenario.wire_dtype,
        scenario.holds_falsely,
        named,
    )
    budget = tuple(
        (name, getattr(scenario, f"num_{name}"))
        for name in ("faults", "aborts", "repeats", "cuts", "restarts", "times")
    )
    seen = {hash((fingerprint(start), budget))}
    ended: set[int] = set()
    border: list[tuple[bytes, Budget, Trail]] = [(start.frozen(), budget, None)]
    for depth in range(scenario.depth + 1):
        following: list[tuple[bytes, Budget, Trail]] = []
        for frozen, left, trail in border:
            found.num_states += 1
            enabled = list(actions(thaw(frozen), scenario, dict(left)))
            if depth == scenario.depth or not enabled:
                found.is_whole = found.is_whole and not enabled
                found.num_ends += 1
                _lead_to_end(frozen, scenario, trail, ended, found)
                continue
            for action, cost in enabled:
                found.num_moves += 1
                model = thaw(frozen)
                _act(model, action, trail)
                after = _pay(left, cost)
                key = hash((fingerprint(model), after))
                if key not in seen:
                    seen.add(key)
                    following.append((model.frozen(), after, (trail, action)))
        border = following
    return found


Trail = tuple["Trail", Action] | None


def actions(model: Model, scenario: Scenario, left: dict[str, int]) -> Iterator[tuple[Action, str]]:
    """Yield what can happen next, and which budget it costs."""
    for plan in model.plans:
        yield from _node_actions(model, plan, left)
    for side in (SENDER, RECEIVER):
        if side not in model.named:
            yield ("name", side), ""
    for to, route in model.wires:
        yield ("deliver", to, route), ""
    for side, route in model.untold:
        yield ("tell", side, route), ""
    if _can_pump(model):
        yield ("pump",), ""
    if left["faults"]:
        yield from _fault_actions(model, scenario)
    if left["cuts"]:
        ways = ("cut", "sever") if scenario.redials else ("cut",)
        yield from (((how, route), "cuts") for route in model.alive for how in ways)
    if left["times"]:
        yield ("pass_time",), "times"
    if scenario.redials and any(link.life.state is LinkState.DOWN for link in model.sender._links.values()):
        yield ("redial",), ""
    if left["restarts"]:
        yield from ((("restart", side), "restarts") for side in (SENDER, RECEIVER))


def _can_pump(model: Model) -> bool:
    """Whether the I/O thread would send a frame, or note that it cannot."""
    for transfer in model.sender._transfers.values():
        frame, link = transfer.peek(), model.sender._links.get(transfer.spec.peer)
        if frame and link and (link.has_room(frame.num_bytes) or transfer._stalled_since_s is None):
            return True
    return False


def _node_actions(model: Model, plan: Plan, left: dict[str, int]) -> Iterator[tuple[Action, str]]:
    mine, theirs = model.runs[SENDER, plan.name], model.runs[RECEIVER, plan.name]
    if not theirs.times:
        yield ("expect", plan), ""
    elif left["repeats"]:
        yield ("expect", plan), "repeats"
    if not mine.times:
        yield ("open", plan), ""
    elif not mine.is_aborted and mine.produced <= NUM_TOKENS:
        yield ("produce", plan), ""
    if mine.is_open and not mine.is_aborted and left["aborts"]:
        yield ("abort", plan, False), "aborts"
        yield ("abort", plan, True), "aborts"
    if not theirs.is_open or theirs.is_aborted:
        return
    if theirs.produced and not theirs.is_decided:
        if model.place is None:
            yield ("grant", plan), ""
        if left["aborts"]:
            yield ("refuse", plan), "aborts"
    if left["aborts"]:
        yield ("cancel", plan), "aborts"


def _fault_actions(model: Model, scenario: Scenario) -> Iterator[tuple[Action, str]]:
    for (to, route), wire in model.wires.items():
        if scenario.beats_only and type(wire[0][0]).__name__ != "Beat":
            continue
        for kind in scenario.faults:
            if kind != "swap" or len(wire) > 1:
                yield (kind, to, route), "faults"


def _act(model: Model, action: Action, trail: Trail) -> None:
    """Do one thing; name the way to it if it breaks a rule or raises."""
    name, *arguments = action
    try:
        getattr(model, "take" if name == "lose" else str(name))(*arguments)
        model.execute()
    except Exception as error:
        kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
        raise Broken(f"{kind}{error}; after {tell((trail, action))}") from error


def _pay(left: Budget, cost: str) -> Budget:
    return tuple((name, num - (name == cost)) for name, num in left) if cost else left


def _lead_to_end(frozen: bytes, scenario: Scenario, trail: Trail, ended: set[int], found: Found) -> None:
    """Deliver and let time pass until nothing is open. `ended` are states that are known to end."""
    model, passed = thaw(frozen), list[int]()
    for _ in range(MOST_STEPS_TO_END):
        _calm(model, trail)
        if not any(run.is_open for run in model.runs.values()):
            break
        key = hash(fingerprint(model))
        if key in ended:
            ended.update(passed)
            return
        passed.append(key)
        _act(model, ("pass_time",), trail)
    ended.update(passed)
    stuck = [f"{side} {name}: {run.events}" for (side, name), run in model.runs.items() if run.is_open]
    if stuck:
        raise Broken(f"never ends: {stuck}; after {tell(trail)}")
    if model.place is not None or model.sender._transfers or model.receiver._transfers:
        raise Broken(f"something is left at the end: {model.place}; after {tell(trail)}")
    outcome = tuple(sorted(word for run in model.runs.values() for word in run.events if word != "closed"))
    found.outcomes.add(outcome)
    all_done = all(run.produced > NUM_TOKENS for (side, _), run in model.runs.items() if side == SENDER)
    all_granted = all(run.is_decided for (side, _), run in model.runs.items() if side == RECEIVER)
    was_ended = any(run.is_aborted for run in model.runs.values())
    if scenario.must_succeed and all_done and all_granted and not was_ended:
        for (side, name), run in model.runs.items():
            if ("acked" if side == SENDER else "received") not in run.events:
                raise Broken(f"{side} of transfer {name} did not succeed: {run.events}; after {tell(trail)}")


def _calm(model: Model, trail: Trail) -> None:
    """Deliver everything, and send what can be sent."""
    while True:
        if model.untold:
            side, route = next(iter(model.untold))
            _act(model, ("tell", side, route), trail)
        elif model.wires:
            to, route = next(iter(model.wires))
            _act(model, ("deliver", to, route), trail)
        elif not model.pump():
            return


def fingerprint(model: Model) -> tuple[object, ...]:
    """Return all of a state that can matter later. Times are relative, stories and counts are left out."""
    network = (
        tuple(sorted(model.alive)),
        tuple(sorted(model.untold)),
        tuple(sorted((key, tuple(map(_said, wire))) for key, wire in model.wires.items())),
        tuple(model.generations.values()),
        tuple(sorted(model.named)),
    )
    runs = tuple((run.times, run.produced, run.is_decided, run.is_aborted, run.events) for run in model.runs.values())
    place = None if model.place is None else (model.place[0], tuple(sorted(model.place[1].items())))
    return _of_sender(model), _of_receiver(model), network, runs, place, tuple(model.up.values())


def _of_sender(model: Model) -> tuple[object, ...]:
    now_s = model.now_s
    links = tuple(
        (
            peer,
            link.life.state.value,
            link.route,
            link.sent_bytes - link.window_limit,
            link.is_retiring,
            _in(link.due_s, now_s),
            _in(link._heard_until_s, now_s),
        )
        for peer, link in model.sender._links.items()
    )
    transfers = tuple(
        (
            name,
            each.spec.peer,
            each.life.state.value,
            each.route,
            tuple(each._planner._segments),
            each._commit is not None,
            each._was_commit_said,
            each._granted_skip,
            each._num_losses,
            each._sequence,
            _in(each._deadline_s, now_s),
            _in(each._repeat_s, now_s),
            each._stalled_since_s is not None,
        )
        for name, each in model.sender._transfers.items()
    )
    return links, transfers, tuple(model.sender._turns)


def _of_receiver(model: Model) -> tuple[object, ...]:
    now_s, table = model.now_s, model.receiver
    links = tuple(
        (
            route,
            link.life.state.value,
            link.peer,
            link._challenge != b"",
            link._window and (link.window.received - link.window.limit, tuple(link.window._needs.items())),
            _in(link.due_s, now_s),
            _in(link._heard_until_s, now_s),
        )
        for route, link in table._links.items()
    )
    transfers = tuple(
        (
            name,
            each.spec.peer,
            each.life.state.value,
            each.route,
            each._is_promised,
            each._num_losses,
            each._sequence,
            tuple(map(tuple, each._coverage._ranges)),
            _in(each.due_s, now_s),
            _in(each._silent_until_s, now_s),
        )
        for name, each in table._transfers.items()
    )
    graves = tuple((name, grave.peer, type(grave.answer).__name__) for name, grave in table._tombstones._graves.items())
    parked = tuple(
        (name, each.route, each.abort is not None, _in(each.until_s, now_s))
        for name, each in table._parked._parked.items()
    )
    return links, transfers, graves, parked, tuple(window.route for window in table._budget._short)


def _in(due_s: float, now_s: float) -> float:
    return round(due_s - now_s, 6)


def _said(sent: tuple[Message, bytes]) -> tuple[object, ...]:
    """Return a message without its random parts."""
    message, payload = sent
    match message:
        case Hello():
            return "hello", message.incarnation, message.expected, message.proof != b""
        case Challenge() | Welcome():
            return (type(message).__name__,)
    return (repr(message), payload)


def tell(trail: Trail) -> str:
    """Return the way to a state as one line."""
    steps: list[str] = []
    while trail is not None:
        trail, action = trail
        steps.append(" ".join(str(part.name) if isinstance(part, Plan) else str(part) for part in action))
    return " → ".join(reversed(steps))


if __name__ == "__main__":
    from tests.kvtransfer.scenarios import DEEP, SCENARIOS

    chosen = DEEP if "deep" in sys.argv else SCENARIOS
    for each in [each for each in chosen if all(word in each.name for word in sys.argv[2:])]:
        began_s = time.monotonic()
        print(each.name, search(each), f"{time.monotonic() - began_s:.1f} s", flush=True)  # noqa: T201
