"""Paged attention against the formula, row by row in float64; the rest of the pool holds NaN."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pdserve.kernels.kv_write import write_kv, write_kv_reference
from pdserve.kernels.paged_attention import paged_attention, paged_attention_reference
from pdserve.kernels.ragged import GROUP_FILL, GROUP_SLOTS, ChunkRows, RaggedPlan
from pdserve.kernels.slots import slots_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int


SHAPES = [Shape(9, 3, 64, 64, 16), Shape(4, 4, 16, 16, 3), Shape(8, 1, 32, 24, 5), Shape(6, 2, 7, 7, 1)]
# (start, rows) per chunk: prompts, later chunks, single rows of very different length, all mixed.
BATCHES = [
    [(0, 1)],
    [(0, 13)],
    [(9, 6), (0, 17)],
    [(40, 1), (3, 1), (21, 1), (0, 1)],
    [(12, 1), (5, 8), (30, 1), (0, 2), (31, 1)],
]


def case(shape: Shape, spans: list[tuple[int, int]]) -> tuple[list[ChunkRows], Tensor, Tensor, Tensor]:
    """Return chunks with scattered blocks, query, and caches in which only visible slots hold numbers."""
    generator = torch.Generator().manual_seed(len(spans) + shape.heads)
    needed = [-(-(start + rows) // shape.block_size) for start, rows in spans]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    chunks, taken = [], 0
    for (start, rows), count in zip(spans, needed, strict=True):
        chunks.append(ChunkRows(start, rows, order[taken : taken + count]))
        taken += count
    num_slots = len(order) * shape.block_size
    keys = torch.full((num_slots, shape.kv_heads, shape.key_dim), float("nan"))
    values = torch.full((num_slots, shape.kv_heads, shape.value_dim), float("nan"))
    for chunk in chunks:
        slots = slots_of(chunk.block_ids, range(chunk.stop), shape.block_size)
        keys[slots] = torch.randn(chunk.stop, shape.kv_heads, shape.key_dim, generator=generator)
        values[slots] = torch.randn(chunk.stop, shape.kv_heads, shape.value_dim, generator=generator)
    query = torch.randn(sum(rows for _, rows in spans), shape.heads, shape.key_dim, generator=generator)
    return chunks, query, keys, values


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spans", BATCHES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 16])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (1.5, False), (None, True), (0.7, True)])
def test_equals_the_formula(
    shape: Shape, spans: list[tuple[int, int]], window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    chunks, query, keys, values = case(shape, spans)
    sinks = torch.linspace(-1, 2, shape.heads) if has_sinks else None
    plan = RaggedPlan(chunks, shape.block_size, torch.float32, CPU)
    ours = paged_attention(query, keys, values, plan, window=window, scaling=0.3, softcap=softcap, sinks=sinks)
    expected = paged_attention_reference(
        query, keys, values, chunks, shape.block_size, window=window, scaling=0.3, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [3, 9])
def test_positions_outside_the_window_are_not_read(window: int) -> None:
    """A decode node need not have received them, so they may hold anything."""
    shape, spans = SHAPES[0], [(30, 1), (25, 1), (17, 5)]
    chunks, query, keys, values = case(shape, spans)
    for chunk in chunks:
        slots = slots_of(chunk.block_ids, range(max(0, chunk.start - window + 1)), shape.block_size)
        keys[slots] = values[slots] = float("nan")
    plan = RaggedPlan(chunks, shape.block_size, torch.float32, CPU)
    out = paged_attention(query, keys, values, plan, window=window, scaling=0.1, softcap=None, sinks=None)
    assert torch.isfinite(out).all()


def test_plan_places_new_tokens() -> None:
    plan = RaggedPlan([ChunkRows(3, 3, [5, 1]), ChunkRows(0, 1, [2])], 4, torch.float32, CPU)
    assert plan.positions.tolist() == [3, 4, 5, 0]
    assert plan.write_slots.tolist() == [5 * 4 + 3, 1 * 4, 1 * 4 + 1, 2 * 4]


def test_decode_groups_pad_little_and_stay_small() -> None:
    lengths = [1, 3, 40, 500, 600, 900, 1000, 1900, 3000]
    chunks = [ChunkRows(length - 1, 1, list(range(-(-length // 16)))) for length in lengths]
    groups, _ = RaggedPlan(chunks, 16, torch.float32, CPU).groups(None)
    rows = sorted(row for group in groups for row in group.rows.tolist())
    assert rows == list(range(len(lengths)))
    for group in groups:
        assert group.gather.shape[0] == group.batch * group.length
        assert group.batch == 1 or group.batch * group.length <= GROUP_SLOTS
        assert min(lengths[row] for row in group.rows.tolist()) >= GROUP_FILL * group.length


def test_wrong_shapes_are_refused() -> None:
    chunks, query, keys, values = case(SHAPES[0], [(0, 4)])
    plan = RaggedPlan(chunks, SHAPES[0].block_size, torch.float32, CPU)
    for wrong in ((query[:3], keys, values), (query[:, :7], keys, values), (query, keys[:, :, :8], values)):
        with pytest.raises(ValueError, match="does not fit"):
            paged_attention(*wrong, plan, window=None, scaling=1.0, softcap=None, sinks=None)
    with pytest.raises(ValueError, match="value cache"):
        paged_attention(query, keys, values[:-1], plan, window=None, scaling=1.0, softcap=None, sinks=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_equals_one_by_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(30, 3, dim, generator=generator).to(dtype) for dim in (8, 5)]
    # As attention hands them over: a transposed view, not contiguous.
    new = [torch.randn(3, 11, dim, generator=generator).to(dtype).transpose(0, 1) for dim in (8, 5)]
    slots = torch.randperm(30, generator=generator)[:11]
    expected = write_kv_reference(caches[0], caches[1], new[0], new[1], slots)
    write_kv(caches[0], caches[1], new[0], new[1], slots)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


def test_kv_write_refuses_what_does_not_fit() -> None:
    cache, slots = torch.zeros(8, 2, 4), torch.arange(3)
    with pytest.raises(ValueError, match="do not fit"):
        write_kv(cache, cache, torch.zeros(3, 2, 5), torch.zeros(3, 2, 4), slots)
    with pytest.raises(ValueError, match="the cache is"):
        write_kv(cache, cache, torch.zeros(3, 2, 4).double(), torch.zeros(3, 2, 4), slots)
