"""Buffers that packed payloads wait in until a socket is done with them: a fixed number, each a lease, shared out among links.

A peer that reads slowly keeps its buffers for long. So that the others go on, slow links together hold no more than half of the
buffers, and the last quarter is shared evenly among the links that want one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.core.errors import InternalError
from pdserve.kvtransfer.channel import Route

SLOW_S = 0.25
"""A link is slow while a buffer of it is out for longer, and until one came back sooner. At 1 Gbit/s a full one takes 8 ms."""


class Slab:
    """One leased buffer. Released exactly once, back to the pool that it came from."""

    def __init__(self, pool: "StagingPool", route: Route, leased_s: float, buffer: bytearray) -> None:
        self._pool = pool
        self.route = route
        self.leased_s = leased_s
        self._buffer: bytearray | None = buffer

    def view(self, num_bytes: int) -> memoryview:
        """Return the first `num_bytes` as a writable view."""
        if self._buffer is None:
            raise InternalError("a released staging buffer was used")
        return memoryview(self._buffer)[:num_bytes]

    def release(self, now_s: float) -> None:
        """Give the buffer back; a second time raises InternalError."""
        if self._buffer is None:
            raise InternalError("a staging buffer was released twice")
        buffer, self._buffer = self._buffer, None
        self._pool.give_back(self, buffer, now_s)


@dataclass(slots=True)
class _Holder:
    """What one connection holds."""

    slabs: dict[Slab, None] = field(default_factory=dict)
    """Oldest first."""
    was_slow: bool = False
    """The last one that came back was out for long."""
    is_gone: bool = False

    def is_slow(self, now_s: float) -> bool:
        """Whether others should not wait for it."""
        return self.was_slow or any(now_s - slab.leased_s > SLOW_S for slab in list(self.slabs)[:1])


class StagingPool:
    """At most `num_slabs` buffers of `slab_bytes`, made when first needed."""

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        self._num_slabs = num_slabs
        self._slab_bytes = slab_bytes
        self._free: list[bytearray] = []
        self._num_leased = 0
        self._holders: dict[Route, _Holder] = {}

    @property
    def has_room(self) -> bool:
        """Whether `lease` would succeed."""
        return self._num_leased < self._num_slabs

    @property
    def leased_bytes(self) -> int:
        """Bytes in leased buffers."""
        return self._num_leased * self._slab_bytes

    def takers(self, wanting: Sequence[Route], now_s: float) -> list[Route]:
        """Return which of the connections that could send now may lease a buffer for it."""
        num_free, reserve = self._num_slabs - self._num_leased, self._num_slabs // 4
        if not num_free:
            return []
        if self._num_leased < self._num_slabs // 2:
            return list(wanting)
        slow = {route for route, holder in self._holders.items() if holder.is_slow(now_s)}
        may_take = list(wanting)
        if sum(map(self._num_held, slow)) >= max(1, self._num_slabs // 2):
            may_take = [route for route in may_take if route not in slow]
        if num_free <= reserve and may_take:
            share = max(1, reserve // len(may_take))
            may_take = [route for route in may_take if self._num_held(route) < share]
        return may_take

    def lease(self, route: Route, now_s: float) -> Slab:
        """Take a buffer for a frame on this connection; raise InternalError if none is left (ask `takers` first)."""
        if not self.has_room:
            raise InternalError("no staging buffer is left")
        self._num_leased += 1
        slab = Slab(self, route, now_s, self._free.pop() if self._free else bytearray(self._slab_bytes))
        self._holders.setdefault(route, _Holder()).slabs[slab] = None
        return slab

    def give_back(self, slab: Slab, buffer: bytearray, now_s: float) -> None:
        """Take a buffer back from its lease."""
        self._num_leased -= 1
        self._free.append(buffer)
        holder = self._holders[slab.route]
        del holder.slabs[slab]
        holder.was_slow = now_s - slab.leased_s > SLOW_S
        if not holder.slabs and (holder.is_gone or not holder.was_slow):
            del self._holders[slab.route]

    def forget(self, route: Route) -> None:
        """The connection is gone; what it holds comes back when its socket is closed."""
        if holder := self._holders.get(route):
            holder.is_gone = True
            if not holder.slabs:
                del self._holders[route]

    def check_invariants(self) -> None:
        """Raise AssertionError if bookkeeping contradicts itself."""
        assert self._num_leased <= self._num_slabs, "too much staging"
        assert sum(map(self._num_held, self._holders)) == self._num_leased, "buffers are held by nobody"
        assert all(each.slabs or (each.was_slow and not each.is_gone) for each in self._holders.values()), (
            "a stale holder"
        )

    def _num_held(self, route: Route) -> int:
        holder = self._holders.get(route)
        return 0 if holder is None else len(holder.slabs)
