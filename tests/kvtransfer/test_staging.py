"""Who gets the buffers that payloads are packed into: peers that read slowly must not take them all."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdserve.core.errors import InternalError
from pdserve.core.ids import Incarnation, new_incarnation
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.messages import Beat, Grant, Welcome
from pdserve.kvtransfer.sender_table import SenderTable
from pdserve.kvtransfer.settings import MAX_FRAMES_IN_SOCKET
from pdserve.kvtransfer.staging import SLOW_S, Slab, StagingPool
from tests.kvtransfer.nodes import settings, spec_for
from tests.kvtransfer.test_flow import ROW

A, B, C, D, E = (Route(name) for name in (b"a", b"b", b"c", b"d", b"e"))
LATER_S = 2 * SLOW_S


class TestLeases:
    def test_are_bounded_and_reused(self) -> None:
        pool = StagingPool(2, 64)
        first, second = pool.lease(A, 0.0), pool.lease(B, 0.0)
        assert not pool.has_room
        assert pool.takers([A, B, C], 0.0) == []
        with pytest.raises(InternalError):
            pool.lease(A, 0.0)
        first.release(0.0)
        assert pool.has_room
        assert pool.leased_bytes == 64
        second.release(0.0)
        assert pool.leased_bytes == 0
        pool.check_invariants()

    def test_are_released_once(self) -> None:
        slab = StagingPool(1, 64).lease(A, 0.0)
        slab.release(0.0)
        with pytest.raises(InternalError, match="twice"):
            slab.release(0.0)
        with pytest.raises(InternalError):
            slab.view(3)


def take(pool: StagingPool, route: Route, number: int, now_s: float = 0.0) -> list[Slab]:
    """Lease so many buffers, each only if it may."""
    slabs = []
    for _ in range(number):
        assert pool.takers([route], now_s) == [route]
        slabs.append(pool.lease(route, now_s))
    return slabs


class TestSlowLinks:
    def test_hold_half_together(self) -> None:
        pool = StagingPool(16, 64)
        for route in (A, B):
            take(pool, route, 4)
        assert pool.takers([A, B, C], SLOW_S) == [A, B, C], "nobody is slow yet"
        assert pool.takers([A, B, C], LATER_S) == [C]

    def test_are_so_until_one_came_back_in_time(self) -> None:
        pool = StagingPool(4, 64)
        slow = take(pool, A, 2)
        assert pool.takers([A], LATER_S) == []
        slow[0].release(LATER_S)
        slow[1].release(LATER_S)
        (again,) = take(pool, A, 1, LATER_S)
        take(pool, B, 1, LATER_S)
        assert pool.takers([A], LATER_S) == [A], "two are free, and slow links hold one"
        take(pool, A, 1, LATER_S)
        assert pool.takers([A], LATER_S) == [], "its last ones were slow"
        again.release(LATER_S + SLOW_S / 2)
        take(pool, A, 1, LATER_S + SLOW_S / 2)
        pool.check_invariants()

    def test_that_are_alone_are_not_held_back(self) -> None:
        """Four frames may be in a socket; that is less than half of sixteen buffers."""
        pool = StagingPool(16, 64)
        for now_s in range(10):
            slabs = take(pool, A, MAX_FRAMES_IN_SOCKET, float(now_s))
            for slab in slabs:
                slab.release(now_s + 0.9)
        pool.check_invariants()

    def test_have_one_buffer_if_there_is_but_one(self) -> None:
        pool = StagingPool(1, 64)
        for now_s in range(5):
            take(pool, A, 1, float(now_s))[0].release(now_s + 0.9)

    def test_are_forgotten_with_their_connection(self) -> None:
        pool = StagingPool(4, 64)
        idle, busy = take(pool, A, 1)[0], take(pool, B, 1)[0]
        idle.release(LATER_S)
        pool.forget(A)
        pool.forget(B)
        busy.release(LATER_S)
        assert pool._holders == {}
        pool.check_invariants()


class TestTheLastQuarter:
    def test_is_shared_by_those_that_want(self) -> None:
        pool = StagingPool(16, 64)
        for route in (A, B, C):
            take(pool, route, 4)
        assert pool.takers([A, B, D, E], 0.0) == [D, E]
        take(pool, D, 1)
        assert pool.takers([A, D, E], 0.0) == [E]
        take(pool, D, 2)
        assert pool.takers([D], 0.0) == [D], "nobody else wants the last one"

    @hypothesis_settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_keeps_nobody_out_for_ever(self, data: st.DataObject) -> None:
        """In any order of leases and releases: bookkeeping holds, and once all buffers came back each link gets some."""
        pool, held, now_s = StagingPool(data.draw(st.integers(1, 20)), 64), list[Slab](), 0.0
        routes = [Route(bytes([number])) for number in range(8)]
        for _ in range(data.draw(st.integers(1, 60))):
            now_s += data.draw(st.sampled_from([0.0, 0.01, SLOW_S, 1.0]))
            wanting = data.draw(st.lists(st.sampled_from(routes), unique=True))
            takers = pool.takers(wanting, now_s)
            assert set(takers) <= set(wanting)
            leases: bool = data.draw(st.booleans())
            if takers and leases:
                held.append(pool.lease(data.draw(st.sampled_from(takers)), now_s))
            elif held:
                held.pop(data.draw(st.integers(0, len(held) - 1))).release(now_s)
            pool.check_invariants()
        for slab in held:
            slab.release(now_s)
        assert pool.leased_bytes == 0
        assert pool.takers(routes, now_s) == routes


class Line:
    """A prefill node's table with decode nodes that let go of frames when a test says so."""

    def __init__(self, num_peers: int) -> None:
        mine = settings(layout=ROW, transfer_idle_s=60.0)
        self.table, self.staging = SenderTable(mine), StagingPool(16, 1 << 20)
        self.inside: dict[Route, deque[Slab]] = {}
        self.num_sent: dict[Route, int] = {}
        peers = {new_incarnation(): Route(bytes([number])) for number in range(num_peers)}
        self.table.set_peers(dict.fromkeys(peers, "there"), 0.0)
        for peer, route in peers.items():
            self._join(peer, route)

    def _join(self, peer: Incarnation, route: Route) -> None:
        table = self.table
        table.dialled(peer, route)
        table.connected(route, 0.0)
        table.message(route, Welcome(peer, (), "on_open", 1 << 40), 0.0)
        spec = spec_for(peer, 1 << 20)
        table.open(spec, 0.0)
        table.message(route, Grant(spec.transfer_id), 0.0)
        self.inside[route], self.num_sent[route] = deque(), 0

    def want(self, route: Route) -> None:
        """This peer's prompt is computed: there is always more to send to it."""
        (transfer,) = [each for each in self.table._transfers.values() if each.route == route]
        self.table.mark_ready(transfer.spec.transfer_id, range(4), range(1 << 20), 0.0)

    def pump(self, now_s: float) -> None:
        """Send all that may be sent."""
        while plan := self.table.next_data(self.staging, now_s):
            route = plan.link.route
            assert route is not None
            self.inside[route].append(self.staging.lease(route, now_s))
            self.num_sent[route] += 1
            self.table.data_sent(plan, 0.0, now_s)
        self.table.check_invariants()
        self.staging.check_invariants()

    def release(self, route: Route, now_s: float) -> None:
        """The socket is done with its oldest frame."""
        if self.inside[route]:
            self.inside[route].popleft().release(now_s)
            self.table.data_released(self.table._by_route[route], route)

    def beat(self, now_s: float) -> None:
        """All peers live."""
        for route in self.inside:
            self.table.message(route, Beat(), now_s)


def test_four_slow_peers_do_not_hold_up_a_fifth() -> None:
    """They live, and read a frame a second each. The fifth reads a frame a millisecond, and has always some under way."""
    line = Line(5)
    *slow, quick = line.inside
    for route in slow:
        line.want(route)
    line.pump(0.0)
    assert line.staging.leased_bytes < 16 << 20, "something is kept for who comes later"
    line.want(quick)
    for ms in range(1, 3001):
        now_s = ms / 1000
        line.pump(now_s)
        line.release(quick, now_s)
        if ms % 1000 == 0:
            line.beat(now_s)
            for route in slow:
                line.release(route, now_s)
        line.pump(now_s)
        if ms > 1000 * SLOW_S + 5:
            assert len(line.inside[quick]) == MAX_FRAMES_IN_SOCKET
    assert line.num_sent[quick] >= 2990, "it waited for others"
    assert all(line.num_sent[route] >= 3 for route in slow), "and they go on at their own pace"
    assert sum(len(line.inside[route]) for route in slow) <= 8


def test_peers_that_read_alike_get_alike() -> None:
    """Ten at once, all quick: none is starved, and all buffers are used."""
    line = Line(10)
    for route in line.inside:
        line.want(route)
    for ms in range(1, 501):
        line.pump(ms / 1000)
        if ms == 1:
            assert line.staging.leased_bytes >= 12 << 20
        for route in list(line.inside)[ms % 3 :: 3]:
            line.release(route, ms / 1000)
    least, most = min(line.num_sent.values()), max(line.num_sent.values())
    assert least > 0.9 * most, line.num_sent
