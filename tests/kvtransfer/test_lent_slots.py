"""What slots refuse, and what they keep when the other end could not be told; the rest shows in the channels that use them."""

from pdserve.kvtransfer.lent_slots import LentSlots, is_slot_list, slot_list

SLOT_BYTES = 8


def slots(num: int) -> tuple[LentSlots, bytearray]:
    memory = bytearray(num * SLOT_BYTES)
    view = memoryview(memory)
    return LentSlots(num, SLOT_BYTES, lambda number: view[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]), memory


def never() -> None:
    raise AssertionError("released")


def test_no_payload_is_longer_than_a_slot() -> None:
    mine, _ = slots(1)
    assert mine.lend(SLOT_BYTES + 1) is None
    assert not mine.has_room(SLOT_BYTES + 1)
    assert mine.has_room(SLOT_BYTES)


def test_a_slot_that_nobody_was_told_of_is_used_next() -> None:
    mine, memory = slots(1)
    assert not mine.send(memoryview(b"lost"), never, lambda slot: False)
    told: list[int] = []
    released: list[str] = []

    def say(slot: int) -> bool:
        told.append(slot)
        return True

    assert mine.send(memoryview(b"kept"), lambda: released.append("copied"), say)
    assert (told, released, bytes(memory[:4])) == ([0], ["copied"], b"kept")
    assert not mine.has_room(1)


def test_a_slot_comes_back_once_and_only_if_it_was_taken() -> None:
    mine, _ = slots(2)
    lent = mine.lend(3)
    assert lent is not None
    released: list[str] = []
    assert mine.send(lent, lambda: released.append("lent"), lambda slot: True)
    assert released == []
    body = slot_list([1, 1, 0, 77])
    assert is_slot_list(body)
    assert not is_slot_list(body[:-1])
    for tell in mine.given_back(body):
        tell()
    assert released == ["lent"]
    assert sorted(mine.free) == [0, 1]
