"""Positions and their places in the pool."""

import pytest
import torch

from pdserve.kernels.slots import slot_of, slots_of

BLOCK_IDS = [7, 2, 5]


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_every_range_follows_the_formula(block_size: int) -> None:
    end = len(BLOCK_IDS) * block_size
    for start in range(end):
        for stop in range(start, end + 1):
            expected = [BLOCK_IDS[p // block_size] * block_size + p % block_size for p in range(start, stop)]
            slots = slots_of(BLOCK_IDS, range(start, stop), block_size)
            assert slots.dtype == torch.int64
            assert slots.tolist() == expected
        assert slot_of(BLOCK_IDS, start, block_size) == slots_of(BLOCK_IDS, range(start, start + 1), block_size)[0]


def test_positions_past_the_table_have_no_slot() -> None:
    assert slots_of(BLOCK_IDS, range(10, 14), 4).tolist() == [22, 23]
    assert slots_of([], range(3), 4).tolist() == []
