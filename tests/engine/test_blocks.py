"""Block leases: one owner per block, one way out, and an oracle that notices when it is not so."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.core.errors import InternalError
from pdserve.engine.blocks import BlockLease, BlockPool, LeaseState, PoolExhausted


def test_blocks_are_taken_and_come_back() -> None:
    pool = BlockPool(10)
    first = pool.lease(4, "first")
    second = pool.lease(3, "second", reserved=True)
    assert (pool.num_free, pool.num_used, pool.num_reserved, pool.num_cached) == (3, 4, 3, 0)
    assert not set(first.block_ids) & set(second.block_ids)
    assert pool.owners == ["first", "second"]
    second.adopt()
    assert (pool.num_used, pool.num_reserved) == (7, 0)
    first.release()
    second.release()
    assert (pool.num_free, pool.num_used, pool.owners) == (10, 0, [])
    pool.check_invariants()


def test_too_many_take_nothing() -> None:
    pool = BlockPool(4)
    lease = pool.lease(3, "a")
    with pytest.raises(PoolExhausted) as caught:
        pool.lease(2, "b")
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    with pytest.raises(PoolExhausted):
        lease.extend(2)
    assert pool.try_lease(2, "b") is None
    assert (pool.num_free, len(lease.block_ids)) == (1, 3)
    pool.check_invariants()


def test_freed_blocks_are_used_again_at_once() -> None:
    pool = BlockPool(8)
    lease = pool.lease(3, "a")
    ids = set(lease.block_ids)
    lease.release()
    assert set(pool.lease(3, "b").block_ids) == ids


def test_extension_keeps_the_order_of_positions() -> None:
    pool = BlockPool(8)
    lease = pool.lease(2, "a")
    before = list(lease.block_ids)
    lease.extend(2)
    assert list(lease.block_ids)[:2] == before
    assert len(set(lease.block_ids)) == 4


def test_a_hold_delays_release() -> None:
    """Failure class 1: blocks reused while bytes still arrive."""
    freed: list[list[int]] = []
    pool = BlockPool(4, on_free=lambda blocks: freed.append(list(blocks)))
    lease = pool.lease(3, "a")
    with lease.hold() as outer:
        with lease.hold():
            lease.release()
            assert lease.state is LeaseState.RELEASING
        assert (pool.num_free, pool.num_used, freed) == (1, 3, [])
        assert len(outer) == 3
    assert (pool.num_free, lease.state, len(freed)) == (4, LeaseState.RELEASED, 1)
    assert lease.block_ids == []


def test_shared_blocks_count_once_and_come_free_with_their_last_lease() -> None:
    """Failure class 11: sequences that continue one context hold its blocks together."""
    freed: list[int] = []
    pool = BlockPool(8, on_free=freed.extend)
    context = pool.lease(4, "context")
    shared, own = list(context.block_ids[:2]), list(context.block_ids[2:])
    one, two = context.fork([*shared, own[0]], "one"), context.fork([*shared, own[1]], "two")
    assert (pool.num_used, pool.num_free, pool.num_shared) == (4, 4, 4)
    context.release()
    assert (pool.num_used, pool.num_free, pool.num_shared, freed) == (4, 4, 2, [])
    two.extend(1)
    one.release()
    assert (pool.num_used, pool.num_shared, freed) == (4, 0, own[:1])
    assert [pool.num_holders(block) for block in shared] == [1, 1]
    two.release()
    assert (pool.num_free, pool.num_used) == (8, 0)
    assert sorted(freed) == list(range(5))
    pool.check_invariants()


def test_a_hold_keeps_shared_blocks_too() -> None:
    pool = BlockPool(4)
    context = pool.lease(2, "context")
    copy = context.fork(context.block_ids, "copy")
    with context.hold():
        context.release()
        copy.release()
        assert pool.num_free == 2
        pool.check_invariants()
    assert pool.num_free == 4


@pytest.mark.parametrize("fault", ["foreign", "twice", "reserved", "released"])
def test_a_fork_that_makes_no_sense_is_a_fault_of_ours(fault: str) -> None:
    pool = BlockPool(6)
    other, lease = pool.lease(1, "other"), pool.lease(2, "a", reserved=fault == "reserved")
    blocks = list(lease.block_ids)
    if fault == "released":
        lease.release()
    wanted = {"foreign": [*blocks, other.block_ids[0]], "twice": blocks[:1] * 2}.get(fault, blocks)
    with pytest.raises(InternalError, match="forked"):
        lease.fork(wanted, "b")
    pool.check_invariants()


def test_a_second_release_raises_with_the_story() -> None:
    lease = BlockPool(2).lease(1, "request 7")
    lease.release()
    with pytest.raises(InternalError, match=r"request 7.*story"):
        lease.release()


@pytest.mark.parametrize("act", ["extend", "hold", "adopt"])
def test_a_released_lease_is_of_no_use(act: str) -> None:
    pool = BlockPool(2)
    lease = pool.lease(1, "a")
    lease.release()
    with pytest.raises(InternalError):
        if act == "extend":
            lease.extend(1)
        elif act == "hold":
            with lease.hold():
                pass
        else:
            lease.adopt()
    pool.check_invariants()


def test_a_with_block_releases_once() -> None:
    pool = BlockPool(2)
    with pool.lease(1, "a") as lease:
        assert pool.num_free == 1
    assert (pool.num_free, lease.state) == (2, LeaseState.RELEASED)
    with pool.lease(1, "b") as lease:
        lease.release()
    assert pool.num_free == 2


@pytest.mark.parametrize(
    "fault", ["lost", "twice", "two owners", "foreign", "owned and free", "miscounted", "repeated"]
)
def test_the_leak_oracle_notices_planted_faults(fault: str) -> None:
    pool = BlockPool(6)
    lease, other = pool.lease(2, "a"), pool.lease(2, "b")
    pool.check_invariants()
    if fault == "lost":
        pool._free.pop()
    elif fault == "twice":
        pool._free.append(pool._free[0])
    elif fault == "two owners":
        other._block_ids[0] = lease.block_ids[0]
    elif fault == "owned and free":
        pool._free.append(lease.block_ids[0])
    elif fault == "miscounted":
        pool._num_holders[lease.block_ids[0]] += 1
    elif fault == "repeated":
        lease._block_ids.append(lease.block_ids[0])
    else:
        pool._free[0] = 99
    with pytest.raises(InternalError, match="block"):
        pool.check_invariants()


def test_books_need_no_torch() -> None:
    code = "import sys, pdserve.engine.blocks, pdserve.engine.batch; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


class Books(RuleBasedStateMachine):
    """Any order of leases, forks, extensions, holds and releases, against books kept by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.pool = BlockPool(12, on_free=self.freed.extend)
        self.live: list[BlockLease] = []
        self.holds: list[tuple[BlockLease, object]] = []

    @rule(count=st.integers(0, 13), reserved=st.booleans())
    def lease(self, count: int, reserved: bool) -> None:
        free = self.pool.num_free
        lease = self.pool.try_lease(count, "x", reserved=reserved)
        assert (lease is None) == (count > free)
        if lease is not None:
            self.live.append(lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(0, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        lease = data.draw(st.sampled_from(self.live))
        before, free = list(lease.block_ids), self.pool.num_free
        if count > free:
            with pytest.raises(PoolExhausted):
                lease.extend(count)
        else:
            lease.extend(count)
        assert list(lease.block_ids)[: len(before)] == before

    @precondition(lambda self: any(lease.state is LeaseState.USED for lease in self.live))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from([lease for lease in self.live if lease.state is LeaseState.USED]))
        chosen = data.draw(st.permutations(lease.block_ids))[: data.draw(st.integers(0, len(lease.block_ids)))]
        free = self.pool.num_free
        fork = lease.fork(chosen, "y")
        assert list(fork.block_ids) == chosen
        assert self.pool.num_free == free
        self.live.append(fork)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.live))
        context = lease.hold()
        context.__enter__()
        self.holds.append((lease, context))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def end_hold(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holds) - 1))
        _, context = self.holds.pop(index)
        context.__exit__(None, None, None)  # type: ignore[attr-defined]  # a context manager of a private type

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        held = any(holder is lease for holder, _ in self.holds)
        others = {block for other in self.owners() if other is not lease for block in other.block_ids}
        alone = set(lease.block_ids) - others
        self.freed.clear()
        lease.release()
        assert sorted(self.freed) == ([] if held else sorted(alone))

    def owners(self) -> list[BlockLease]:
        """Leases that are not over, by the test's own books."""
        return list({id(lease): lease for lease in [*self.live, *(lease for lease, _ in self.holds)]}.values())

    @invariant()
    def adds_up(self) -> None:
        pool = self.pool
        pool.check_invariants()
        assert pool.num_free + pool.num_used + pool.num_reserved + pool.num_cached == pool.num_blocks
        holders = Counter(block for lease in self.owners() for block in lease.block_ids)
        assert len(holders) == pool.num_blocks - pool.num_free
        assert pool.num_shared == sum(count > 1 for count in holders.values())
        assert all(pool.num_holders(block) == holders[block] for block in range(pool.num_blocks))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
