"""Who owns which block of a KV pool. Every owned block belongs to at least one lease, and a lease ends exactly once.

A block is free, reserved (promised to a transfer that has not been adopted), used, or cached (kept for a later prompt; the
prefix cache is not built yet, so none is). Leases of sequences that continue one context share its blocks (`BlockLease.fork`); a
shared block comes free with the last lease that holds it, and counts once. Nobody writes into a block that another lease holds,
except behind the positions that the other reads. Blocks come free in the order last-in first-out: a stale writer is then
found out soon.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from pdserve.core.errors import InternalError
from pdserve.core.layout import num_blocks_for
from pdserve.core.lifecycle import LifeCycle, TransitionTable

__all__ = ["BlockLease", "BlockPool", "PoolExhausted", "num_blocks_for"]


class PoolExhausted(Exception):
    """The pool has fewer free blocks than were asked for; nothing was taken."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


class LeaseState(Enum):
    """Where a lease stands."""

    RESERVED = "reserved"
    USED = "used"
    RELEASING = "releasing"
    """Released by its owner, but a step or placement in progress still holds it."""
    RELEASED = "released"


class LeaseEvent(Enum):
    """What happens to a lease."""

    ADOPT = "adopt"
    RELEASE = "release"
    LAST_HOLD_ENDED = "last hold ended"


LEASE_TABLE = TransitionTable(
    name="block lease",
    initial=LeaseState.RESERVED,
    terminal=frozenset({LeaseState.RELEASED}),
    moves={
        (LeaseState.RESERVED, LeaseEvent.ADOPT): LeaseState.USED,
        (LeaseState.RESERVED, LeaseEvent.RELEASE): LeaseState.RELEASING,
        (LeaseState.USED, LeaseEvent.RELEASE): LeaseState.RELEASING,
        (LeaseState.RELEASING, LeaseEvent.LAST_HOLD_ENDED): LeaseState.RELEASED,
    },
)
"""All moves are ours, so every other pair raises: a second release is a fault of the program, not of the world."""


@dataclass(eq=False)
class BlockLease:
    """Blocks of one owner. Made by `BlockPool.lease`; ends with `release`, or at the end of a `with` block."""

    pool: "BlockPool"
    owner: str
    _block_ids: list[int]
    _life: LifeCycle[LeaseState, LeaseEvent]
    _num_holds: int = field(default=0)

    @property
    def block_ids(self) -> Sequence[int]:
        """The blocks in the order of the sequence's positions. Empty once released."""
        return self._block_ids

    @property
    def state(self) -> LeaseState:
        """Where the lease stands."""
        return self._life.state

    def adopt(self) -> None:
        """Turn a reservation into use: the KV that it was promised for has arrived."""
        with self.pool.lock:
            self._life.advance(LeaseEvent.ADOPT, 0.0)
            self.pool.num_reserved -= len(self._block_ids)

    def fork(self, block_ids: Sequence[int], owner: str) -> "BlockLease":
        """Return another lease, in use, on some of this lease's blocks, in the given order; this one keeps them as well.

        Raises InternalError if a block is not of this lease or is named twice, or if the lease is not in use.
        """
        with self.pool.lock:
            if self._life.state is not LeaseState.USED:
                raise InternalError(f"lease of {self.owner} forked while not in use; {self._life.tell()}")
            if len(set(block_ids)) != len(block_ids) or not set(block_ids) <= set(self._block_ids):
                raise InternalError(f"lease of {self.owner} forked with blocks that are not its own, or twice")
            return self.pool.share(block_ids, owner)

    def extend(self, num_blocks: int) -> None:
        """Take `num_blocks` more at the end; raise PoolExhausted (and take nothing) if there are not as many."""
        with self.pool.lock:
            if self._life.state not in (LeaseState.RESERVED, LeaseState.USED):
                raise InternalError(f"lease of {self.owner} extended after its release; {self._life.tell()}")
            self._block_ids.extend(self.pool.take(num_blocks))
            if self._life.state is LeaseState.RESERVED:
                self.pool.num_reserved += num_blocks

    @contextmanager
    def hold(self) -> Iterator[Sequence[int]]:
        """Keep the blocks while a step, packing or placement touches them: a release meanwhile completes afterwards."""
        with self.pool.lock:
            if self._life.state not in (LeaseState.RESERVED, LeaseState.USED):
                raise InternalError(f"lease of {self.owner} held after its release; {self._life.tell()}")
            self._num_holds += 1
        try:
            yield self._block_ids
        finally:
            with self.pool.lock:
                self._num_holds -= 1
                self._free_if_due()

    def release(self) -> None:
        """Give the blocks back, at once or when the last hold ends. A second release raises InternalError."""
        with self.pool.lock:
            if self._life.state is LeaseState.RESERVED:
                self.pool.num_reserved -= len(self._block_ids)
            self._life.advance(LeaseEvent.RELEASE, 0.0)
            self._free_if_due()

    def _free_if_due(self) -> None:
        if self._life.state is LeaseState.RELEASING and self._num_holds == 0:
            self._life.advance(LeaseEvent.LAST_HOLD_ENDED, 0.0)
            self.pool.give_back(self, self._block_ids)
            self._block_ids = []

    def __enter__(self) -> "BlockLease":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._life.state in (LeaseState.RESERVED, LeaseState.USED):
            self.release()


class BlockPool:
    """The books of `num_blocks` blocks, numbered from 0. Safe to use from several threads.

    `on_free` is called with the ids of blocks just before they become free (tests poison them there).
    """

    def __init__(self, num_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError("a pool has at least one block")
        self.num_blocks = num_blocks
        self.lock = threading.RLock()
        self._on_free = on_free
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._leases: set[BlockLease] = set()
        self.num_reserved = 0
        """Blocks of leases that wait for their KV. Kept by the leases, as the next one by the pool: who asks pays nothing."""
        self.num_shared = 0
        """Blocks that more than one lease holds."""

    def lease(self, num_blocks: int, owner: str, *, reserved: bool = False) -> BlockLease:
        """Take `num_blocks` (>= 0) for `owner`, in use or only reserved; raise PoolExhausted, taking none, if too few."""
        with self.lock:
            life = LifeCycle(LEASE_TABLE, owner, 0.0)
            lease = BlockLease(self, owner, self.take(num_blocks), life)
            self._leases.add(lease)
            self.num_reserved += num_blocks
            if not reserved:
                lease.adopt()
            return lease

    def try_lease(self, num_blocks: int, owner: str, *, reserved: bool = False) -> BlockLease | None:
        """Do as `lease`, but return None if there are too few blocks."""
        try:
            return self.lease(num_blocks, owner, reserved=reserved)
        except PoolExhausted:
            return None

    def num_holders(self, block_id: int) -> int:
        """Return how many leases hold a block; 0 if it is free."""
        return self._num_holders[block_id]

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks of adopted leases, and of released ones that are still held; a shared block counts once."""
        with self.lock:
            return self.num_blocks - len(self._free) - self.num_reserved

    @property
    def num_cached(self) -> int:
        """Blocks kept for later prompts: none until the prefix cache is built."""
        return 0

    @property
    def owners(self) -> list[str]:
        """Owners of live leases, sorted: the first thing to read when blocks are missing."""
        with self.lock:
            return sorted(lease.owner for lease in self._leases)

    def check_invariants(self) -> None:
        """Raise InternalError unless every block is in the free list once, or in as many live leases as are counted for it.

        Recomputed from the free list and the leases themselves, never from counters.
        """
        with self.lock:
            free = Counter(self._free)
            owners: dict[int, list[str]] = {}
            for lease in self._leases:
                for block in lease.block_ids:
                    owners.setdefault(block, []).append(lease.owner)
            faults = [
                fault
                for block in sorted({*range(self.num_blocks), *free, *owners})
                if (fault := self._fault_of(block, free[block], owners.get(block, [])))
            ]
            faults += [
                f"lease of {lease.owner} names a block twice" for lease in self._leases if _repeats(lease.block_ids)
            ]
            faults += self._wrong_counts(owners)
            ended = [lease.owner for lease in self._leases if lease.state is LeaseState.RELEASED]
            faults += [f"lease of {owner} is released but still on the books" for owner in ended]
        if faults:
            raise InternalError("block pool: " + "; ".join(faults[:8]))

    def _fault_of(self, block: int, num_free: int, owners: Sequence[str]) -> str:
        if not 0 <= block < self.num_blocks:
            return f"block {block} is not of this pool"
        if num_free + bool(owners) != 1:
            places = ["free list"] * num_free + list(owners)
            return f"block {block}: {' and '.join(places) or 'lost'}"
        if len(owners) != self._num_holders[block]:
            return (
                f"block {block}: held by {' and '.join(owners) or 'nobody'}, counted {self._num_holders[block]} times"
            )
        return ""

    def _wrong_counts(self, owners: dict[int, list[str]]) -> list[str]:
        """Compare the counters with the leases."""
        shared = sum(len(names) > 1 for names in owners.values())
        reserved = sum(len(lease.block_ids) for lease in self._leases if lease.state is LeaseState.RESERVED)
        counted = {"shared": (self.num_shared, shared), "reserved": (self.num_reserved, reserved)}
        return [
            f"{stated} {name} blocks counted, {true} found"
            for name, (stated, true) in counted.items()
            if stated != true
        ]

    def take(self, num_blocks: int) -> list[int]:
        """Remove `num_blocks` from the free list, for a lease. Call with the lock held."""
        if num_blocks < 0:
            raise ValueError("cannot take a negative number of blocks")
        if num_blocks > len(self._free):
            raise PoolExhausted(num_blocks, len(self._free))
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._num_holders[block] = 1
        return taken

    def share(self, block_ids: Sequence[int], owner: str) -> BlockLease:
        """Return a lease in use on blocks of another lease, for `BlockLease.fork`. Call with the lock held."""
        life = LifeCycle(LEASE_TABLE, owner, 0.0)
        life.advance(LeaseEvent.ADOPT, 0.0)
        for block in block_ids:
            self._num_holders[block] += 1
            self.num_shared += self._num_holders[block] == 2
        lease = BlockLease(self, owner, list(block_ids), life)
        self._leases.add(lease)
        return lease

    def give_back(self, lease: BlockLease, block_ids: Sequence[int]) -> None:
        """End a lease's hold of its blocks; those that no other holds go to the free list. Call with the lock held."""
        self._leases.remove(lease)
        for block in block_ids:
            self._num_holders[block] -= 1
            self.num_shared -= self._num_holders[block] == 1
        freed = [block for block in block_ids if self._num_holders[block] == 0]
        if freed and self._on_free is not None:
            self._on_free(freed)
        self._free.extend(reversed(freed))


def _repeats(block_ids: Sequence[int]) -> bool:
    return len(set(block_ids)) != len(block_ids)
