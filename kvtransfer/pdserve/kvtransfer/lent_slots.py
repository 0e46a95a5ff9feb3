"""Slots of memory that the other end of a route reads from: not written to again before it gave them back."""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_SLOT = struct.Struct("<I")


@dataclass(slots=True)
class LentSlots:
    """`num_slots` slots of `slot_bytes`; `view` returns the memory of one, by number."""

    num_slots: int
    slot_bytes: int
    view: Callable[[int], memoryview]
    free: list[int] = field(init=False)
    taken: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Slots that the other end has not given back, and whom to tell when it does."""
    lent: memoryview | None = None
    """The view of the slot that is free next, as `lend` returned it."""

    def __post_init__(self) -> None:
        self.free = list(range(self.num_slots))

    def lend(self, num_bytes: int) -> memoryview | None:
        """Return a slot to pack into; None if none is free, or none is as long."""
        if not self.has_room(num_bytes):
            return None
        self.lent = self.view(self.free[-1])[:num_bytes]
        return self.lent

    def has_room(self, num_bytes: int) -> bool:
        """Whether a payload of that size can be put into one."""
        return bool(self.free) and num_bytes <= self.slot_bytes

    def send(self, payload: memoryview, on_released: Callable[[], None], tell: Callable[[int], bool]) -> bool:
        """Have `tell` say to the other end in which slot `payload` lies; return what it returned. Only with room.

        What was not packed into what `lend` gave is copied first, and released at once.
        """
        slot = self.free[-1]
        is_packed_here = payload is self.lent
        if not is_packed_here:
            self.view(slot)[: len(payload)] = payload
        if not tell(slot):
            return False
        self.free.pop()
        self.lent = None
        self.taken[slot] = on_released if is_packed_here else _nothing
        if not is_packed_here:
            on_released()
        return True

    def given_back(self, body: bytes | memoryview) -> list[Callable[[], None]]:
        """Take back what the other end names as `slot_list` does; return whom to tell. What was not taken is passed over."""
        told = []
        for (slot,) in _SLOT.iter_unpack(body):
            if (on_released := self.taken.pop(slot, None)) is not None:
                self.free.append(slot)
                told.append(on_released)
        return told

    def give_up(self) -> list[Callable[[], None]]:
        """The memory is of no use any more: keep no view of it; return whom to tell of what was taken."""
        self.lent = None
        return list(self.taken.values())


def slot_list(slots: Iterable[int]) -> bytes:
    """Return slot numbers as they travel, 32 bits each."""
    return b"".join(map(_SLOT.pack, slots))


def is_slot_list(body: bytes | memoryview) -> bool:
    """Whether `body` can be what `slot_list` returns."""
    return len(body) % _SLOT.size == 0


def _nothing() -> None:
    """A copy of our own needs no release."""
