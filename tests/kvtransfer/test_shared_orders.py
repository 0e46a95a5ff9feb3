"""Every order of sending, delivery, loss and passing time on a connection with shared memory.

This lies below the protocol's machines, so the search of `test_exploration.py` does not see it. Two real channels with real
memory, over a transport whose every frame is delivered when the search says so. A run is told again from its start for each
step; runs that stand alike are followed once.
"""

import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import pytest

from pdserve.core.clock import ManualClock
from pdserve.kvtransfer import shared_channel
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import Arrived, ChannelEvent, Connected, Lost, Route
from pdserve.kvtransfer.shared_channel import PROOF_WAIT_S, SEEN, UNSEEN, SharedMemoryChannel
from tests.kvtransfer.test_shared_memory import memory_held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract sockets are Linux's")

PORT = 100_000 + os.getpid()
"""No TCP port, so no other listener's Unix socket has its name."""
NUM_SLOTS, SLOT_BYTES, NUM_PAYLOADS = 2, 64, 4
ROUTE = Route(b"route")
Frame = tuple[bytes, ...]


class Broken(AssertionError):
    """The channel did what it must never do."""


@dataclass
class Line:
    """One end of the transport: what it told its channel, and what is under way from it."""

    told: deque[ChannelEvent] = field(default_factory=deque)
    under_way: deque[Frame] = field(default_factory=deque)
    is_cut: bool = False

    def listen(self, host: str, port: int) -> str:
        return f"tcp://here:{PORT}"

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        return ROUTE

    def trust(self, route: Route) -> None:
        """Nobody is a stranger."""

    def disconnect(self, route: Route) -> None:
        self.told.clear()

    def send(self, route: Route, header: bytes) -> bool:
        if not self.is_cut:
            self.under_way.append((header,))
        return True

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        if not self.is_cut:
            self.under_way.append((header, bytes(payload)))
        on_released()
        return True

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        events = list(self.told)
        self.told.clear()
        return events

    def watch(self, fd: int) -> None:
        """Each poll of the channel looks at its door anyway."""

    def wake(self) -> None:
        """Nothing waits."""

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.told.clear()


class Run:
    """A dialling and a listening channel, and what has happened between them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.lines = {"dialler": Line(), "listener": Line()}
        self.dialler = SharedMemoryChannel(self.lines["dialler"], self.clock)
        self.listener = SharedMemoryChannel(self.lines["listener"], self.clock)
        self.listener.listen("", 0)
        self.dialler.connect(f"tcp://here:{PORT}")
        self.lines["dialler"].told.append(Connected(ROUTE))
        self.is_connected = False
        self.untold: set[str] = set()
        self.num_sent = self.num_arrived = 0
        self.released: list[int] = []
        self.has_waited = False
        self.poll("dialler")

    def actions(self) -> Iterator[str]:
        """What can happen next."""
        if self.is_connected and self.num_sent < NUM_PAYLOADS and "dialler" not in self.untold:
            yield "send"
        for sender in self.lines:
            if self.lines[sender].under_way:
                yield f"deliver from {sender}"
        yield from (f"tell {name}" for name in sorted(self.untold))
        if not self.lines["dialler"].is_cut:
            yield "cut"
        if not self.has_waited and not self.is_connected:
            yield "wait"

    def act(self, action: str) -> None:
        """Do one of them, and check."""
        match action.split():
            case ["send"]:
                self.send()
            case ["deliver", _, sender]:
                to = "listener" if sender == "dialler" else "dialler"
                self.lines[to].told.append(Arrived(ROUTE, self.lines[sender].under_way.popleft()))
                self.poll(to)
            case ["cut"]:
                for name, line in self.lines.items():
                    line.is_cut = True
                    line.under_way.clear()
                    self.untold.add(name)
            case ["tell", name]:
                self.untold.discard(name)
                self.lines[name].told.append(Lost(ROUTE, "cut"))
                self.poll(name)
            case ["wait"]:
                self.has_waited = True
                self.clock.advance(PROOF_WAIT_S)
                self.poll("dialler")

    def send(self) -> None:
        number, self.num_sent = self.num_sent, self.num_sent + 1
        payload = bytes([number + 1]) * (SLOT_BYTES - number)
        lent = self.dialler.lend(ROUTE, len(payload))
        into = memoryview(bytearray(len(payload))) if lent is None else lent
        into[:] = payload
        self.dialler.send_data(ROUTE, b"%d" % number, into, lambda: self.released.append(number))

    def poll(self, name: str) -> None:
        for event in (self.dialler if name == "dialler" else self.listener).poll(0.0):
            match event:
                case Connected():
                    self.is_connected = True
                case Lost():
                    self.is_connected = False
                case Arrived(_, frames):
                    self.arrived(tuple(bytes(frame) for frame in frames))
        if len(self.released) != len(set(self.released)):
            raise Broken(f"a payload was given back twice: {self.released}")

    def arrived(self, frames: Frame) -> None:
        number = self.num_arrived
        if frames != (b"%d" % number, bytes([number + 1]) * (SLOT_BYTES - number)):
            raise Broken(f"payload {number} arrived as {frames}")
        self.num_arrived += 1

    def end(self, actions: tuple[str, ...]) -> None:
        """Nothing can happen any more after these actions."""
        is_whole = self.num_arrived == self.num_sent == NUM_PAYLOADS
        if not is_whole and not self.lines["dialler"].is_cut:
            raise Broken(f"{self.num_arrived} of {self.num_sent} payloads arrived after {actions}")
        if sorted(self.released) != list(range(self.num_sent)):
            raise Broken(f"of {self.num_sent} payloads these were given back: {self.released}; after {actions}")

    def looks(self) -> tuple[object, ...]:
        """All of it that can matter later; what is random is left out."""
        shared = self.dialler._owned.get(ROUTE)
        mine = (shared.is_proven, tuple(shared.slots.free), tuple(shared.slots.taken)) if shared is not None else ()
        kinds = tuple(
            (tuple((frames[0][:5], len(frames)) for frames in line.under_way), line.is_cut)
            for line in self.lines.values()
        )
        counts = (self.num_sent, self.num_arrived, tuple(self.released), self.is_connected, self.has_waited)
        return mine, ROUTE in self.listener._mapped, kinds, counts, tuple(sorted(self.untold))


def told(actions: tuple[str, ...]) -> Run:
    """Return a run that stands after these actions."""
    run = Run()
    try:
        for action in actions:
            run.act(action)
    except BaseException:
        run.dialler.close()
        run.listener.close()
        raise
    return run


def search() -> tuple[int, int]:
    """Go through every order; return the number of states and of ends."""
    seen, border, num_ends = set[tuple[object, ...]](), deque[tuple[str, ...]]([()]), 0
    while border:
        before = border.popleft()
        for action in _next(before):
            try:
                run = told((*before, action))
            except Broken as broken:
                raise Broken(f"{broken}; after {' → '.join((*before, action))}") from None
            with closing(run.dialler), closing(run.listener):
                if (looks := run.looks()) not in seen:
                    seen.add(looks)
                    border.append((*before, action))
                if not any(True for _ in run.actions()):
                    num_ends += 1
                    run.end((*before, action))
    return len(seen), num_ends


def _next(before: tuple[str, ...]) -> list[str]:
    run = told(before)
    with closing(run.dialler), closing(run.listener):
        return list(run.actions())


def released_when_sent(patch: pytest.MonkeyPatch) -> None:
    """A slot is free as soon as its descriptor is sent."""
    send_data = SharedMemoryChannel.send_data

    def early(
        self: SharedMemoryChannel, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]
    ) -> bool:
        is_sent = send_data(self, route, header, payload, on_released)
        if (shared := self._owned.get(route)) is not None:
            shared.slots.free.extend(shared.slots.taken)
            self._released.extend(shared.slots.taken.values())
            shared.slots.taken.clear()
        return is_sent

    patch.setattr(SharedMemoryChannel, "send_data", early)


def used_before_the_proof(patch: pytest.MonkeyPatch) -> None:
    """The claim alone counts."""
    offer = SharedMemoryChannel._offer

    def trusting(self: SharedMemoryChannel, route: Route) -> bool:
        is_offered = offer(self, route)
        if is_offered:
            self._owned[route].is_proven = True
        return False

    patch.setattr(SharedMemoryChannel, "_offer", trusting)


def keeps_what_a_lost_route_lent(patch: pytest.MonkeyPatch) -> None:
    def forgetful(self: SharedMemoryChannel, route: Route) -> None:
        self._owned.pop(route, None)
        self._mapped.pop(route, None)

    patch.setattr(SharedMemoryChannel, "_forget", forgetful)


def takes_a_late_answer_for_a_message(patch: pytest.MonkeyPatch) -> None:
    """It was so: an answer that came after the wait for it was a damaged frame to the protocol, and cost the connection."""
    is_ours = SharedMemoryChannel._is_ours

    def all_but_late(
        self: SharedMemoryChannel, route: Route, frame: bytes | memoryview, free: dict[Route, list[int]]
    ) -> bool:
        is_late = bytes(frame[:5]) in (SEEN, UNSEEN) and route not in self._owned
        return not is_late and is_ours(self, route, frame, free)

    patch.setattr(SharedMemoryChannel, "_is_ours", all_but_late)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (released_when_sent, "arrived as"),
    (used_before_the_proof, "arrived as|payloads arrived after {actions}"),
    (keeps_what_a_lost_route_lent, "were given back"),
    (takes_a_late_answer_for_a_message, "arrived as"),
]


@pytest.mark.parametrize(("mutant", "why"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_mutant_is_killed(mutant: Callable[[pytest.MonkeyPatch], None], why: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(Broken, match=why):
            search()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_channel, "NUM_SLOTS", NUM_SLOTS)
    monkeypatch.setattr(shared_channel, "MAX_FRAME_BYTES", SLOT_BYTES)


def test_no_order_breaks_the_shared_slots() -> None:
    """What arrives is what was sent, in order; each payload is given back once; nothing is left."""
    gc.collect()
    before = memory_held()
    num_states, num_ends = search()
    print(f"{num_states} states, {num_ends} ends")  # noqa: T201 - the record of the run
    assert num_states > 100
    gc.collect()  # runs refer to themselves, and a view of a slot keeps its mapping
    assert memory_held() == before
