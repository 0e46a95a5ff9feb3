"""How much one program of an attention kernel takes, by hand-made rules; measured on no GPU yet.

Ahead-of-time checks compile every tile that these rules can give, and hold its registers and shared memory to a budget.
"""

from dataclasses import dataclass

import triton

MIN_ROWS = 16
"""Fewest rows of a matrix product on every target."""
MIN_POSITIONS = 32
"""Fewest positions of a tile: one-byte operands need as many."""
SPLIT_POSITIONS = 256
"""A split shorter than this costs more in the merge than it gains."""
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4
"""So many decode programs fit side by side on a multiprocessor, and hide each other's loads."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and cached positions of one program's matrix products, its warps and the stages of its loads."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int


def decode_tile(group: int, padded_dim: int, element_bytes: int) -> Tile:
    """Return the tile for `group` query heads a KV head, the larger head dim padded, and cache elements of that size."""
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    is_wide = padded_dim * element_bytes > 256
    return Tile(rows, MIN_POSITIONS if is_wide else 64, 4, 2 if is_wide else 3)


def prefill_tile(max_rows: int, group: int, padded_dim: int, element_bytes: int, stored_bytes: int) -> Tile:
    """Return the tile for chunks of at most `max_rows` tokens, elements of the query and of the cache of those sizes.

    `group` and `padded_dim` are as for decode. What needs many registers a row takes fewer rows, and more warps for them: the
    ahead-of-time check saw the larger tiles spill.
    """
    is_heavy = padded_dim > 128 or element_bytes > 2 or stored_bytes == 1
    largest = 64 if is_heavy else 128
    # At least one token with all its heads.
    smallest = max(MIN_ROWS, triton.next_power_of_2(group))
    rows = max(smallest, min(largest, triton.next_power_of_2(max_rows * group)))
    return Tile(rows, MIN_POSITIONS if is_heavy else 64, 8 if rows >= largest else 4, 2)


def num_splits(batch: int, kv_heads: int, max_length: int, num_sms: int) -> int:
    """Return into how many parts a sequence's positions are split, so that the device is busy but the parts stay long.

    By the longest context as well as by the batch: a small batch of long contexts, and also a medium one whose programs fill
    only part of a last wave, would otherwise leave most of the device idle.
    """
    wanted = -(-PROGRAMS_PER_SM * num_sms // max(1, batch * kv_heads))
    return max(1, min(wanted, -(-max_length // SPLIT_POSITIONS), MAX_SPLITS))
