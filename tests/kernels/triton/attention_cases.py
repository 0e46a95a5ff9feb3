"""Cases of paged attention that catch faults, and how a kernel is judged on one.

Each holds what has caught faults elsewhere: the longest sequence last, with a block table whose memory ends where it ends; an
empty sequence; several tiles per split; 2^30 in the unused entries of tables; and NaN in everything that no row may see: free
pages, the tails of pages, positions before the window, the query's neighbours in a packed projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.paged_attention import paged_attention_reference
from pdserve.kernels.ragged import ChunkRows
from pdserve.kernels.slots import slots_of
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.kv_quantize import quantize_reference
from pdserve.kernels.triton.paged_decode import DecodeRows
from pdserve.kernels.triton.paged_prefill import PrefillChunks
from pdserve.kernels.triton.tiles import Tile
from tests.kernels.triton.pairwise import all_pairs

UNUSED = 2**30
UNTOUCHED = 77.0
"""Stands in output rows that belong to no sequence."""
TOLERANCES = {torch.float32: (2e-6, 5e-6), torch.float16: (5e-4, 1e-3), torch.bfloat16: (6e-3, 8e-3)}
"""Absolute and relative; of 16 bits the weights' rounding before the second product is most."""
LENGTHS = (33, 0, 1, 21, 70)
SPANS = ((9, 6), (0, 0), (0, 13), (40, 1), (21, 30))
"""Start and rows of prefill chunks."""
HEADS = ((4, 4), (8, 2), (5, 1), (9, 3))
DIMS = ((64, 64), (80, 80), (72, 40), (128, 128), (7, 5), (256, 256))

Decode = Callable[..., None]
Prefill = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What all attention kernels have in common."""

    dtype: torch.dtype
    storage: torch.dtype | None
    heads: tuple[int, int]
    dims: tuple[int, int]
    block_size: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    is_packed: bool
    positions: int

    @property
    def scaling(self) -> float:
        """Scores so spread that a cap, a sink and a mask all bite."""
        return float(2.0 / self.dims[0] ** 0.5)

    @property
    def sinks(self) -> Tensor | None:
        """A sink per query head."""
        return torch.linspace(-1, 3, self.heads[0]) if self.has_sinks else None


COMMON: dict[str, Sequence[object]] = {
    "dims": DIMS,
    "heads": HEADS,
    "block_size": (16, 5, 8, 1),
    "window": (None, 1, 7, 33),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "storage": (None, torch.int8, torch.float8_e4m3fn),
    "softcap": (None, 1.5),
    "has_sinks": (False, True),
    "is_packed": (False, True),
    "positions": (16, 32),
}
DECODE = all_pairs({**COMMON, "splits": (1, 2, 3, 7)})
PREFILL = all_pairs({**COMMON, "rows": (16, 32)})


def shape_of(case: dict[str, object]) -> Shape:
    """Return the part of a case that both kernels share."""
    return Shape(**{name: case[name] for name in COMMON})  # type: ignore[arg-type]  # the table's columns have these types


@dataclass(frozen=True, slots=True)
class Pool:
    """A cache in which only what may be seen is a number, and the same in the numbers that it means."""

    cache: PagedCache
    keys: Tensor
    values: Tensor
    chunks: list[ChunkRows]
    tables: Tensor


def pool_of(shape: Shape, spans: Sequence[tuple[int, int]], generator: torch.Generator) -> Pool:
    """Return the pool of sequences that have positions up to start + rows each, with scattered pages."""
    needed = [-(-(start + rows) // shape.block_size) for start, rows in spans]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    chunks, seen = [], []
    for (start, rows), count in zip(spans, needed, strict=True):
        chunks.append(ChunkRows(start, rows, [order.pop() for _ in range(count)]))
        first = 0 if shape.window is None else max(0, start - shape.window + 1)
        slots = slots_of(chunks[-1].block_ids, range(start + rows), shape.block_size)
        seen.append(slots[first:] if rows else slots[:0])
    slots, num_slots = torch.cat(seen), (sum(needed) + 3) * shape.block_size
    keys, key_scales, meant_keys = _stored(shape, shape.dims[0], num_slots, slots, generator)
    values, value_scales, meant_values = _stored(shape, shape.dims[1], num_slots, slots, generator)
    tables = torch.full((len(spans), max(needed)), UNUSED, dtype=torch.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.block_ids)] = torch.tensor(chunk.block_ids, dtype=torch.int32)
    cache = PagedCache(keys, values, shape.block_size, key_scales, value_scales)
    return Pool(cache, meant_keys, meant_values, chunks, tables)


def _stored(
    shape: Shape, dim: int, num_slots: int, slots: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return a cache, its scales, and the numbers it means; NaN (or a scale of NaN) where nothing may be seen."""
    numbers = torch.randn(slots.shape[0], shape.heads[1], dim, generator=generator).to(shape.dtype)
    meant = torch.full((num_slots, shape.heads[1], dim), float("nan"))
    if shape.storage is None:
        meant[slots] = numbers.float()
        return meant.to(shape.dtype), None, meant
    stored, scales = quantize_reference(numbers, shape.storage)
    meant[slots] = stored.float() * scales[..., None]
    cache = torch.full(meant.shape, 127 if shape.storage == torch.int8 else float("nan")).to(shape.storage)
    # By way of bytes: torch indexes no float8.
    cache.view(torch.uint8)[slots] = stored.view(torch.uint8)
    all_scales = torch.full(meant.shape[:2], float("nan"))
    all_scales[slots] = scales
    return cache, all_scales, meant


def query_of(shape: Shape, num_rows: int, generator: torch.Generator) -> Tensor:
    """Return [rows, heads, key_dim], cut out of a packed projection whose other columns are NaN, or by itself."""
    num_heads = shape.heads[0]
    packed = torch.full((num_rows, num_heads + (3 if shape.is_packed else 0), shape.dims[0]), float("nan"))
    packed[:, :num_heads] = torch.randn(num_rows, num_heads, shape.dims[0], generator=generator)
    return packed.to(shape.dtype)[:, :num_heads]


def judge(shape: Shape, out: Tensor, expected: Tensor) -> None:
    """Raise AssertionError unless the rows are those expected, within the type's tolerance."""
    absolute, relative = TOLERANCES[shape.dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=absolute, rtol=relative)


def expected_rows(shape: Shape, query: Tensor, pool: Pool, chunks: list[ChunkRows]) -> Tensor:
    """Return what the reference makes of the query's rows, which follow each other chunk by chunk."""
    return paged_attention_reference(
        query,
        pool.keys,
        pool.values,
        chunks,
        shape.block_size,
        window=shape.window,
        scaling=shape.scaling,
        softcap=shape.softcap,
        sinks=shape.sinks,
    )


def check_decode(case: dict[str, object], paged_decode: Decode) -> None:
    """Raise unless the kernel does a case of `DECODE` right."""
    shape, generator = shape_of(case), torch.Generator().manual_seed(1)
    pool = pool_of(shape, [(length - 1, 1) if length else (0, 0) for length in LENGTHS], generator)
    # The query's order is not the batch's, and one row belongs to nobody.
    rows = torch.tensor([4, 0, 5, 2, 1], dtype=torch.int32)
    query = query_of(shape, len(LENGTHS) + 1, generator)
    out = torch.full((query.shape[0], shape.heads[0], shape.dims[1]), UNTOUCHED).to(shape.dtype)
    paged_decode(
        query,
        pool.cache,
        DecodeRows(rows, torch.tensor(LENGTHS, dtype=torch.int32), pool.tables, max(LENGTHS)),
        out,
        window=shape.window,
        scaling=shape.scaling,
        softcap=shape.softcap,
        sinks=shape.sinks,
        splits=case["splits"],
        tile=Tile(16, shape.positions, 4, 1),
    )
    live = [index for index, length in enumerate(LENGTHS) if length]
    places = rows[live].long()
    judge(shape, out[places], expected_rows(shape, query[places], pool, [pool.chunks[index] for index in live]))
    assert out[int(rows[LENGTHS.index(0)])].count_nonzero() == 0, "an empty sequence has an output"
    assert (out[3] == UNTOUCHED).all(), "a row of nobody was written"


def check_prefill(case: dict[str, object], paged_prefill: Prefill) -> None:
    """Raise unless the kernel does a case of `PREFILL` right."""
    shape, generator = shape_of(case), torch.Generator().manual_seed(2)
    pool = pool_of(shape, SPANS, generator)
    num_rows = torch.tensor([rows for _, rows in SPANS], dtype=torch.int32)
    first_rows = (num_rows.cumsum(0) - num_rows + 1).to(torch.int32)  # row 0 is nobody's
    query = query_of(shape, int(num_rows.sum()) + 2, generator)  # nor is the last
    out = torch.full((query.shape[0], shape.heads[0], shape.dims[1]), UNTOUCHED).to(shape.dtype)
    starts = torch.tensor([start for start, _ in SPANS], dtype=torch.int32)
    paged_prefill(
        query,
        pool.cache,
        PrefillChunks(first_rows, num_rows, starts, pool.tables, int(num_rows.max())),
        out,
        window=shape.window,
        scaling=shape.scaling,
        softcap=shape.softcap,
        sinks=shape.sinks,
        tile=Tile(int(str(case["rows"])), shape.positions, 4, 1),
    )
    judge(shape, out[1:-1], expected_rows(shape, query[1:-1], pool, pool.chunks))
    assert (out[[0, -1]] == UNTOUCHED).all(), "a row of nobody was written"


LARGE = Shape(torch.bfloat16, None, (8, 4), (64, 64), 16, None, None, False, False, 16)
LAST_PAGE = 2**31 // (4 * 64 * 16) + 3
"""In a cache of `LARGE` its elements lie beyond what 32 bits, signed, can count."""


def check_large(paged_decode: Decode | None, paged_prefill: Prefill | None) -> None:
    """Raise unless the kernels find the last page of a cache over 4 GiB, of which all but a few pages is never touched."""
    generator, tables = torch.Generator().manual_seed(3), torch.tensor([[LAST_PAGE, 3]], dtype=torch.int32)
    caches = [torch.empty((LAST_PAGE + 1) * 16, 4, 64, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.cat([torch.arange(16) + LAST_PAGE * 16, torch.arange(4) + 3 * 16])
    for cache in caches:
        cache[slots] = torch.randn(20, 4, 64, generator=generator).to(torch.bfloat16)
    query = torch.randn(20, 8, 64, generator=generator).to(torch.bfloat16)
    options = {"window": None, "scaling": LARGE.scaling, "softcap": None, "sinks": None}
    pool = Pool(PagedCache(caches[0], caches[1], 16), caches[0], caches[1], [], tables)
    zero, twenty = torch.zeros(1, dtype=torch.int32), torch.full((1,), 20, dtype=torch.int32)
    out = torch.empty_like(query)
    if paged_prefill is not None:
        paged_prefill(query, pool.cache, PrefillChunks(zero, twenty, zero, tables, 20), out, **options)
        judge(LARGE, out, expected_rows(LARGE, query, pool, [ChunkRows(0, 20, [LAST_PAGE, 3])]))
    if paged_decode is not None:
        paged_decode(query[:1], pool.cache, DecodeRows(zero, twenty, tables, 20), out[:1], **options, splits=2)
        judge(LARGE, out[:1], expected_rows(LARGE, query[:1], pool, [ChunkRows(19, 1, [LAST_PAGE, 3])]))
