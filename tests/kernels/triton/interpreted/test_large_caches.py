"""Caches over 4 GiB, of which the last page is used: what does not fit in 32 bits is multiplied in 64.

The memory is asked for and never touched, but for the pages in use.
"""

import torch

from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.kv_quantize import write_quantized_kv
from pdserve.kernels.triton.kv_write import write_kv
from pdserve.kernels.triton.paged_decode import paged_decode
from pdserve.kernels.triton.paged_prefill import paged_prefill
from pdserve.kernels.triton.wire_pack import gather_layers, scatter_layers
from tests.kernels.triton.attention_cases import LAST_PAGE, check_large

HEADS, DIM, BLOCK = 4, 64, 16
NUM_SLOTS = (LAST_PAGE + 1) * BLOCK


def test_attention() -> None:
    check_large(paged_decode, paged_prefill)


def test_write() -> None:
    caches = (
        torch.empty(NUM_SLOTS, HEADS, DIM, dtype=torch.bfloat16),
        torch.empty(NUM_SLOTS, HEADS, DIM, dtype=torch.bfloat16),
    )
    assert caches[0].nbytes > 2**32
    slots, new = torch.tensor([NUM_SLOTS - 1, 0, NUM_SLOTS - 17]), torch.randn(2, 3, HEADS, DIM).to(torch.bfloat16)
    write_kv(*caches, new[0], new[1], slots)
    for cache, written in zip(caches, new, strict=True):
        assert torch.equal(cache[slots], written)


def test_packing() -> None:
    """Rows of odd length, so that they move byte by byte, and bytes are what is counted."""
    num_slots = 2**31 // 255 + 9
    caches = (torch.empty(num_slots, 5, 51, dtype=torch.int8), torch.empty(num_slots, 5, 51, dtype=torch.int8))
    slots = torch.tensor([num_slots - 1, 5, num_slots - 3])
    kept = torch.randint(-128, 128, (2, 3, 5, 51), dtype=torch.int8)
    for cache, rows in zip(caches, kept, strict=True):
        cache[slots] = rows
    wire = torch.empty(kept.numel(), dtype=torch.uint8)
    gather_layers([caches], slots, wire)
    assert torch.equal(wire.view(torch.int8), kept.flatten())
    for cache in caches:
        cache[slots] = 0
    scatter_layers([caches], slots, wire)
    for cache, rows in zip(caches, kept, strict=True):
        assert torch.equal(cache[slots], rows)


def test_quantized_write() -> None:
    slots = torch.tensor([2 * NUM_SLOTS - 1, 0])
    keys, values = (torch.empty(2 * NUM_SLOTS, HEADS, DIM, dtype=torch.int8) for _ in range(2))
    scales = [torch.empty(2 * NUM_SLOTS, HEADS) for _ in range(2)]
    new = torch.ones(2, HEADS, DIM)
    write_quantized_kv(PagedCache(keys, values, BLOCK, scales[0], scales[1]), new, new, slots)
    assert (keys[slots] == 127).all() and (values[slots] == 127).all()
    assert torch.allclose(scales[1][slots], torch.tensor(1 / 127))
