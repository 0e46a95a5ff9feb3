"""The receive windows of all links together: their sum is bounded, one link alone is as fast as ever, and none starves."""

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdserve.core.ids import Incarnation, TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import Acked, Opened
from pdserve.kvtransfer.instructions import Dial, Emit, Send
from pdserve.kvtransfer.messages import Beat, Data, Message, Welcome
from pdserve.kvtransfer.receive_window import ReceiveBudget, ReceiveWindow
from pdserve.kvtransfer.receiver_table import ReceiverTable
from pdserve.kvtransfer.sender_table import SenderTable
from pdserve.kvtransfer.settings import LinkSettings
from pdserve.kvtransfer.staging import StagingPool
from pdserve.kvtransfer.wire import checksum
from tests.kvtransfer.nodes import CAPABILITIES, FIRST, settings, spec_for
from tests.kvtransfer.test_flow import ROW
from tests.kvtransfer.world import World

MIB = 1 << 20
BASE = 2 * MIB
STAGING = StagingPool(1, MIB)
"""Always free."""


def transfer(number: int) -> TransferId:
    return TransferId(bytes([number % 256, number // 256] * 8))


def make(budget_bytes: int = 256 * MIB, num_links: int = 1) -> tuple[ReceiveBudget, list[ReceiveWindow]]:
    budget = ReceiveBudget(BASE, 64 * MIB, budget_bytes)
    return budget, [budget.open(Route(bytes([number]))) for number in range(num_links)]


class TestOneLink:
    def test_begins_with_its_base(self) -> None:
        budget, (window,) = make()
        assert window.limit == BASE
        assert not window.grow()
        budget.check_invariants()

    def test_has_a_whole_window_for_a_large_transfer(self) -> None:
        """As large as without a bound on the sum, and kept so while the transfer goes on."""
        budget, (window,) = make()
        assert window.set_need(transfer(0), 1000 * MIB)
        assert window.grow()
        assert window.limit == 64 * MIB
        for _ in range(900):
            assert window.take(MIB)
            window.set_need(transfer(0), window.need_bytes - MIB)
            window.grow()
            assert window.limit - window.received > 48 * MIB, "never less than three quarters"
            budget.check_invariants()

    def test_gets_no_more_than_its_transfers_need(self) -> None:
        budget, (window,) = make()
        window.set_need(transfer(0), 5 * MIB)
        window.set_need(transfer(1), 4 * MIB)
        window.grow()
        assert (window.limit, budget.leased_bytes) == (BASE + 9 * MIB, 9 * MIB)
        assert not window.set_need(transfer(1), 0), "less is no reason to tell"
        window.top_up()
        assert window.limit == BASE + 9 * MIB, "what was said stays said"

    def test_is_told_seldom(self) -> None:
        """Many small transfers, eight in flight: each beat costs both sides as much as a small frame."""
        budget, (window,) = make()
        num_told = 0
        for number in range(108):
            window.set_need(transfer(number), MIB)
            num_told += window.grow()
            if number >= 8:
                assert window.take(MIB), "and never too late"
                window.set_need(transfer(number - 8), 0)
                num_told += window.grow()
        assert num_told <= 108 / 4
        budget.check_invariants()

    def test_is_told_in_time_for_the_next_frame(self) -> None:
        _, (window,) = make()
        window.set_need(transfer(0), 100 * MIB)
        while window.need_bytes:
            assert window.limit - window.received >= min(MIB, window.need_bytes)
            num_bytes = min(MIB - 1, window.need_bytes)
            assert window.take(num_bytes)
            window.set_need(transfer(0), window.need_bytes - num_bytes)
            window.grow()

    def test_gives_its_lease_back_as_bytes_come(self) -> None:
        budget, (window,) = make()
        window.set_need(transfer(0), 10 * MIB)
        window.grow()
        for num_left in range(9, -1, -1):
            window.take(MIB)
            window.set_need(transfer(0), num_left * MIB)
            window.grow()
            assert budget.leased_bytes == num_left * MIB
        budget.check_invariants()

    def test_counts_what_an_aborted_transfer_left_until_it_is_used(self) -> None:
        budget, (window, other) = make(budget_bytes=10 * MIB, num_links=2)
        window.set_need(transfer(0), 12 * MIB)
        window.grow()
        window.set_need(transfer(0), 0)
        assert budget.leased_bytes == 10 * MIB
        other.set_need(transfer(1), 12 * MIB)
        assert not other.grow(), "nothing is left but its base"
        window.set_need(transfer(2), 8 * MIB)
        assert not window.grow(), "it may send that much already"
        window.take(6 * MIB)
        assert list(budget.told_of_room()) == [other.route]
        budget.check_invariants()

    def test_takes_its_lease_along(self) -> None:
        budget, (window, other) = make(budget_bytes=10 * MIB, num_links=2)
        window.set_need(transfer(0), 12 * MIB)
        window.grow()
        other.set_need(transfer(1), 12 * MIB)
        other.grow()
        budget.close(window)
        assert list(budget.told_of_room()) == [other.route]
        assert other.limit == 12 * MIB
        budget.check_invariants()

    def test_is_told_nothing_when_it_is_gone(self) -> None:
        budget, (window, other) = make(budget_bytes=10 * MIB, num_links=2)
        for number, each in enumerate((window, other)):
            each.set_need(transfer(number), 12 * MIB)
            each.grow()
        budget.close(other)
        window.take(8 * MIB)
        assert list(budget.told_of_room()) == []
        budget.check_invariants()

    def test_keeps_its_base_whatever_comes(self) -> None:
        """Bytes of transfers that are over, or more than was thought, are no reason to stand still."""
        budget, (window,) = make()
        for _ in range(10):
            assert window.take(MIB)
            assert not window.grow(), "nobody waits for it"
            window.top_up()
            assert window.limit - window.received == BASE
        budget.check_invariants()

    def test_says_when_more_came_than_it_allowed(self) -> None:
        _, (window,) = make()
        assert window.take(BASE)
        assert not window.take(1)


class TestManyLinks:
    def test_share_evenly_when_all_are_active(self) -> None:
        budget, windows = make(budget_bytes=100 * MIB, num_links=10)
        for number, window in enumerate(windows):
            window.set_need(transfer(number), 1000 * MIB)
        for window in windows:
            window.grow()
        assert [window.limit for window in windows] == [12 * MIB] * 10
        budget.check_invariants()

    def test_are_told_of_room_in_turn(self) -> None:
        """One that took all while it was alone gives it back as its bytes come."""
        budget, (first, *others) = make(budget_bytes=64 * MIB, num_links=5)
        first.set_need(transfer(0), 1000 * MIB)
        first.grow()
        for number, window in enumerate(others, start=1):
            window.set_need(transfer(number), 1000 * MIB)
            window.grow()
        told = list[Route]()
        while len(told) < 8:
            assert first.take(MIB), "it still has what it was told"
            first.grow()
            told += budget.told_of_room()
            budget.check_invariants()
        assert set(told[:4]) == {window.route for window in others}

    @hypothesis_settings(max_examples=150, deadline=None)
    @given(st.integers(1, 12), st.integers(MIB, 40 * MIB), st.data())
    def test_never_exceed_the_sum_and_always_end(self, num_links: int, budget_bytes: int, data: st.DataObject) -> None:
        """Any sizes, ends, aborts and lost beats, in any order: each peer sends what it may, and is done in the end."""
        budget, windows = make(budget_bytes, num_links)
        told = {window: window.limit for window in windows}
        left = dict.fromkeys(windows, 0)
        numbers = iter(range(10_000))
        current: dict[ReceiveWindow, TransferId] = {}

        def said(window: ReceiveWindow, is_lost: bool) -> None:
            told[window] = told[window] if is_lost else window.limit

        def receive(window: ReceiveWindow, is_lost: bool) -> bool:
            num_bytes = min(left[window], MIB, told[window] - window.received)
            if num_bytes < min(left[window], MIB):
                return False
            assert window.take(num_bytes)
            left[window] -= num_bytes
            window.set_need(current[window], left[window])
            if window.grow():
                said(window, is_lost)
            for route in list(budget.told_of_room()):
                said(next(each for each in windows if each.route == route), is_lost)
            return num_bytes > 0

        for _ in range(data.draw(st.integers(1, 40))):
            window = data.draw(st.sampled_from(windows))
            act = data.draw(st.sampled_from(["grant", "receive", "receive", "abort", "beat"]))
            is_lost = data.draw(st.booleans())
            if act == "grant" and not left[window]:
                left[window] = data.draw(st.integers(1, 100 * MIB))
                current[window] = transfer(next(numbers))
                if window.set_need(current[window], left[window]) and window.grow():
                    said(window, is_lost)
            elif act == "abort" and left[window]:
                left[window] = 0
                window.set_need(current[window], 0)
            elif act == "receive" and left[window]:
                receive(window, is_lost)
            elif act == "beat":
                window.top_up()
                said(window, is_lost)
            budget.check_invariants()
            outstanding = sum(each.limit - each.received for each in windows)
            assert outstanding <= num_links * BASE + budget_bytes
        for _ in range(2000):
            if not any(left.values()):
                break
            for window in windows:
                # A periodic beat repeats what a lost one said.
                window.top_up()
                said(window, is_lost=False)
                while left[window] and receive(window, is_lost=False):
                    budget.check_invariants()
        assert not any(left.values()), "somebody waits for ever"


class Crowd:
    """One decode node and many prefill nodes, whose messages are handed over at once."""

    def __init__(self, theirs: LinkSettings, num_peers: int) -> None:
        self.receiver = ReceiverTable(theirs)
        self.senders: dict[Route, SenderTable] = {}
        self.peers: dict[Route, Incarnation] = {}
        self.frames: dict[Route, deque[tuple[Message, bytes]]] = {}
        """DATA that is under way."""
        self.acked: set[TransferId] = set()
        self.most_under_way = 0
        mine = [settings(layout=ROW) for _ in range(num_peers)]
        self.receiver.set_peers(frozenset(each.incarnation for each in mine), 0.0)
        for number, each in enumerate(mine):
            route = Route(number.to_bytes(2, "little"))
            self.peers[route], self.frames[route] = each.incarnation, deque()
            self.senders[route] = SenderTable(each)
            self.senders[route].set_peers({theirs.incarnation: "there"}, 0.0)
            self.talk()

    def talk(self) -> None:
        """Hand over all that is not DATA."""
        is_moving = True
        while is_moving:
            is_moving = False
            for route, sender in self.senders.items():
                while (order := sender.take()) is not None:
                    is_moving = True
                    match order:
                        case Dial(peer, _):
                            sender.dialled(peer, route)
                            sender.connected(route, 0.0)
                        case Send(_, message):
                            self.frames[route].append((message, b""))
                        case Emit(Acked(transfer_id)):
                            self.acked.add(transfer_id)
                while self.frames[route] and not self.frames[route][0][1]:
                    self.receiver.message(route, self.frames[route].popleft()[0], memoryview(b""), 0.0)
            while (reply := self.receiver.take()) is not None:
                is_moving = True
                match reply:
                    case Send():
                        self.senders[reply.route].message(reply.route, reply.message, 0.0)
                    case Emit(Opened(transfer_id)):
                        self.receiver.grant(transfer_id, 0, 0.0)
        self.receiver.check_invariants()

    def send(self, payload: bytes) -> bool:
        """Each peer sends all that it may."""
        has_sent = False
        for route, sender in self.senders.items():
            while plan := sender.next_data(STAGING, 0.0):
                content = payload[: plan.frame.num_bytes]
                self.frames[route].append((plan.transfer.header(plan.frame, checksum(content)), content))
                sender.data_sent(plan, 0.0, 0.0)
                sender.data_released(plan.link, route)
                has_sent = True
        under_way = sum(len(payload) for wire in self.frames.values() for _, payload in wire)
        self.most_under_way = max(self.most_under_way, under_way)
        return has_sent

    def receive(self) -> bool:
        """One frame of each peer arrives."""
        has_come = False
        for route, wire in self.frames.items():
            if wire:
                message, payload = wire.popleft()
                self.receiver.message(route, message, memoryview(payload), 0.0)
                has_come = True
        return has_come


def test_a_hundred_peers_at_once_are_bounded_and_all_arrive() -> None:
    """No beat but those that the machines send for frames: nobody waits for another for ever."""
    num_peers, budget_bytes = 100, 32 * MIB
    theirs = settings(layout=ROW, receive_bytes=budget_bytes)
    crowd = Crowd(theirs, num_peers)
    sizes = [512, 1024, 128, 2048]
    ids = []
    for number, (route, sender) in enumerate(crowd.senders.items()):
        mine = spec_for(theirs.incarnation, sizes[number % len(sizes)])
        crowd.receiver.expect(replace(mine, peer=crowd.peers[route]), 0.0)
        sender.open(mine, 0.0)
        sender.mark_ready(mine.transfer_id, range(4), range(mine.num_tokens), 0.0)
        sender.commit(mine.transfer_id, FIRST, {}, 0.0, 0.0)
        ids.append(mine.transfer_id)
    crowd.talk()
    payload = bytes(MIB)
    is_moving = True
    while is_moving:
        is_moving = crowd.send(payload)
        is_moving |= crowd.receive()
        crowd.talk()
    assert crowd.acked == set(ids)
    assert crowd.most_under_way <= num_peers * BASE + budget_bytes
    assert crowd.most_under_way > num_peers * BASE // 2, "the test sent too little to mean anything"


def test_room_that_comes_back_is_told_to_who_came_off_short() -> None:
    """A peer whose connection is lost gives back what it leased, and another goes on with it."""
    theirs = settings(layout=ROW, receive_bytes=8 * MIB)
    crowd = Crowd(theirs, 3)
    for route, sender in crowd.senders.items():
        mine = spec_for(theirs.incarnation, 8192)
        crowd.receiver.expect(replace(mine, peer=crowd.peers[route]), 0.0)
        sender.open(mine, 0.0)
        crowd.talk()
    lost, *others = crowd.senders
    (rich,) = (link for link in crowd.receiver._links.values() if link.route == lost)
    assert rich.window.leased_bytes == 8 * MIB, "it came first, and was alone"
    crowd.receiver.lost(lost, "disconnected", 0.0)
    told = [order for order in iter(crowd.receiver.take, None) if isinstance(order, Send)]
    assert [(order.route, type(order.message)) for order in told] == [(route, Beat) for route in others]
    crowd.receiver.check_invariants()


def test_the_base_is_restored_by_the_next_beat() -> None:
    """When no transfer needs it at once."""
    world = World(settings(layout=ROW), settings(layout=ROW)).meet()
    transfer_id = world.open(128)
    world.send_all(transfer_id, 128)
    world.advance(1.0)
    beat = world.said("<", Beat)[-1]
    assert isinstance(beat, Beat)
    assert beat.window_limit == ROW.range_bytes(range(4), 128) + BASE


def test_a_large_transfer_hears_of_its_window_at_its_grant() -> None:
    world = World(settings(layout=ROW), settings(layout=ROW)).meet()
    world.sends_data = False
    world.open(128 * 64)
    (welcome,) = world.said("<", Welcome)
    (beat,) = world.said("<", Beat)
    assert isinstance(welcome, Welcome)
    assert isinstance(beat, Beat)
    assert (welcome.window_limit, beat.window_limit) == (BASE, 64 * MIB)


@pytest.mark.parametrize("dtype", ["", "int8"])
def test_what_travels_in_eight_bits_leases_no_more_than_comes(dtype: str) -> None:
    """Else an idle link would keep what was never sent."""
    takes = replace(CAPABILITIES, wire_dtypes=("float32", "int8"))
    sends = replace(CAPABILITIES, wire_dtypes=(dtype or "float32",))
    world = World(
        settings(layout=ROW, capabilities=sends, wire_dtype=dtype),
        settings(layout=ROW, capabilities=takes, wire_dtype="int8"),
    )
    world.sink.place = lambda *_: None  # type: ignore[method-assign]  # bytes of the small form, which this pool does not know
    world.source.pack = lambda *_: None  # type: ignore[method-assign]  # the same
    world.meet()
    transfer_id = world.open(128 * 64)
    coming = world.receiver._transfers[transfer_id]
    assert coming.missing_bytes == world.theirs.wire_layout.range_bytes(range(4), 128 * 64)
    world.mark(transfer_id, range(4), range(128))
    said = world.said(">", Data)
    came = sum(message.num_bytes for message in said if isinstance(message, Data))
    assert came > 0
    assert coming.missing_bytes == world.mine.wire_layout.range_bytes(range(4), 128 * 64) - came
    world.mark(transfer_id, range(4), range(128, 128 * 64))
    world.commit(transfer_id)
    assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
    assert world.receiver._budget.leased_bytes == 0
