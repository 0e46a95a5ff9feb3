"""Where a sequence's positions lie in a paged pool.

    slot(p) = block_table[p // block_size] * block_size + p % block_size

A slot is one token position of the pool, so its tensors are `[slots, kv_heads, dim]` and know nothing of blocks. This is the
one place that knows the mapping.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def slot_of(block_ids: Sequence[int], position: int, block_size: int) -> int:
    """Return the slot of one position of the sequence with that block table."""
    return block_ids[position // block_size] * block_size + position % block_size


def slots_of(block_ids: Sequence[int], positions: range, block_size: int) -> Tensor:
    """Return the slots of `positions` (step 1) of the sequence with that block table: int64, on the CPU.

    Positions past the end of the table have no slot, so the answer is then shorter than `positions`.
    """
    first, last = positions.start // block_size, -(-positions.stop // block_size)
    blocks = torch.tensor(block_ids[first:last], dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    offset = positions.start - first * block_size
    return slots[offset : offset + len(positions)]
