"""Buffers that packed payloads wait in until a socket is done with them: a fixed number, each a lease."""

from pdserve.core.errors import InternalError


class Slab:
    """One leased buffer. Released exactly once, back to the pool that it came from."""

    def __init__(self, pool: "StagingPool", buffer: bytearray) -> None:
        self._pool = pool
        self._buffer: bytearray | None = buffer

    def view(self, num_bytes: int) -> memoryview:
        """Return the first `num_bytes` as a writable view."""
        if self._buffer is None:
            raise InternalError("a released staging buffer was used")
        return memoryview(self._buffer)[:num_bytes]

    def release(self) -> None:
        """Give the buffer back; a second time raises InternalError."""
        if self._buffer is None:
            raise InternalError("a staging buffer was released twice")
        self._pool.give_back(self._buffer)
        self._buffer = None


class StagingPool:
    """At most `num_slabs` buffers of `slab_bytes`, made when first needed."""

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        self._num_slabs = num_slabs
        self._slab_bytes = slab_bytes
        self._free: list[bytearray] = []
        self._num_leased = 0

    @property
    def has_room(self) -> bool:
        """Whether `lease` would succeed."""
        return self._num_leased < self._num_slabs

    @property
    def leased_bytes(self) -> int:
        """Bytes in leased buffers."""
        return self._num_leased * self._slab_bytes

    def lease(self) -> Slab:
        """Take a buffer; raise InternalError if none is left (ask `has_room` first)."""
        if not self.has_room:
            raise InternalError("no staging buffer is left")
        self._num_leased += 1
        return Slab(self, self._free.pop() if self._free else bytearray(self._slab_bytes))

    def give_back(self, buffer: bytearray) -> None:
        """Take a buffer back from its lease."""
        self._num_leased -= 1
        self._free.append(buffer)
