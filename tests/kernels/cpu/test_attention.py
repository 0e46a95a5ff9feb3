"""Native attention against the formula in float64, with NaN wherever nobody may look; and its promise about neighbours."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.native.library import NativeLibrary
from pdserve.kernels.native.tape import AttentionLayer, Place, Tape, TapeStep
from pdserve.kernels.paged_attention import paged_attention_reference
from pdserve.kernels.ragged import ChunkRows
from pdserve.kernels.slots import slots_of
from tests.kernels.cpu.libraries import every_library


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32


SHAPES = {
    "smollm2": Shape(9, 3, 64, 64),
    "one head each": Shape(4, 4, 16, 16, block_size=3),
    "group of eight": Shape(8, 1, 128, 128, window=37),
    "group of five, values shorter": Shape(10, 2, 96, 80, block_size=5, softcap=2.0),
    "gemma 3": Shape(4, 1, 256, 256, window=70),
    "odd dims, sinks": Shape(6, 2, 7, 9, block_size=1, has_sinks=True),
    "all of it": Shape(12, 4, 40, 40, block_size=8, window=9, softcap=1.5, has_sinks=True),
    "bf16": Shape(9, 3, 64, 64, dtype=torch.bfloat16),
    "fp16, window": Shape(14, 2, 48, 48, window=65, dtype=torch.float16),
}
# (start, rows) per chunk. Positions are worked on 64 at a time, lines 24 at a time.
BATCHES = {
    "first token": [(0, 1)],
    "prompts": [(0, 63), (0, 65), (0, 2)],
    "later chunks": [(60, 9), (128, 5)],
    "decode": [(63, 1), (64, 1), (200, 1), (5, 1), (127, 1)],
    "mixed": [(12, 1), (150, 30), (30, 1), (0, 4)],
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@dataclass(frozen=True)
class Case:
    """A step over caches that hold NaN where no row looks."""

    chunks: list[ChunkRows]
    query: Tensor
    layer: AttentionLayer


def case_of(shape: Shape, spans: list[tuple[int, int]]) -> Case:
    generator = torch.Generator().manual_seed(len(spans) + shape.heads)
    needed = [-(-(start + rows) // shape.block_size) for start, rows in spans]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    size = (len(order) * shape.block_size, shape.kv_heads)
    keys = torch.full((*size, shape.key_dim), float("nan"), dtype=shape.dtype)
    values = torch.full((*size, shape.value_dim), float("nan"), dtype=shape.dtype)
    chunks = []
    for (start, rows), count in zip(spans, needed, strict=True):
        chunks.append(ChunkRows(start, rows, [order.pop() for _ in range(count)]))
        seen = range(max(0, start + 1 - shape.window) if shape.window else 0, start + rows)
        slots = slots_of(chunks[-1].block_ids, seen, shape.block_size)
        for cache in (keys, values):
            cache[slots] = torch.randn(len(seen), *cache.shape[1:], generator=generator).to(shape.dtype)
    query = torch.randn(sum(rows for _, rows in spans), shape.heads, shape.key_dim, generator=generator)
    sinks = torch.linspace(-1, 2, shape.heads) if shape.has_sinks else None
    layer = AttentionLayer(
        keys, values, shape.block_size, shape.heads, shape.window, 0.3, softcap=shape.softcap, sinks=sinks
    )
    return Case(chunks, query, layer)


def attended(library: NativeLibrary, case: Case, threads: int = 1) -> Tensor:
    """Return [rows, heads, value_dim]."""
    num_rows, heads, key_dim = case.query.shape
    value_dim = case.layer.value_cache.shape[2]
    tape = Tape(library, threads)
    query, y = tape.activation(heads * key_dim), tape.activation(heads * value_dim)
    tape.attend(Place(query), Place(y), case.layer)
    step = TapeStep([0] * num_rows, case.chunks, [], case.layer.block_size)
    tape.run(step)  # makes room for the rows
    query.memory[:num_rows] = case.query.flatten(1)
    tape.run(step)
    tape.close()
    return y.memory[:num_rows].view(num_rows, heads, value_dim).clone()


def expected_of(case: Case) -> Tensor:
    layer = case.layer
    return paged_attention_reference(
        case.query.double(),
        layer.key_cache.double(),
        layer.value_cache.double(),
        case.chunks,
        layer.block_size,
        window=layer.window,
        scaling=layer.scaling,
        softcap=layer.softcap,
        sinks=layer.sinks,
    )


@every_library
@every_shape
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES.keys())
def test_equals_the_formula(library: NativeLibrary, shape: Shape, spans: list[tuple[int, int]]) -> None:
    case = case_of(shape, spans)
    torch.testing.assert_close(attended(library, case).double(), expected_of(case).double(), atol=3e-6, rtol=1e-5)


@every_library
@pytest.mark.parametrize("left_out", ["window", "softcap", "sinks"])
def test_the_comparison_sees_what_is_left_out(library: NativeLibrary, left_out: str) -> None:
    case = case_of(SHAPES["all of it"], BATCHES["decode"])
    for cache in (case.layer.key_cache, case.layer.value_cache):
        cache.nan_to_num_(0.5)
    less: dict[str, Any] = {left_out: None}
    faulty = replace(case, layer=replace(case.layer, **less))
    difference = (attended(library, faulty) - expected_of(case)).abs().max()
    assert float(difference) > 1e-3


@every_library
@every_shape
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_gets_the_same_bits_in_any_cut_and_beside_any_others(
    library: NativeLibrary, shape: Shape, threads: int
) -> None:
    case = case_of(shape, [(0, 150), (70, 1)])
    together = attended(library, case, threads)
    whole, other = case.chunks
    assert torch.equal(attended(library, Case([other], case.query[150:], case.layer)), together[150:])
    start = 0
    for rows in (1, 2, 64, 30, 53):
        cut = Case([ChunkRows(start, rows, whole.block_ids)], case.query[start : start + rows], case.layer)
        assert torch.equal(attended(library, cut), together[start : start + rows])
        start += rows


@every_library
def test_heads_that_are_too_large_are_refused(library: NativeLibrary) -> None:
    cache = torch.zeros(4, 1, 257)
    tape = Tape(library)
    x = tape.activation(257)
    with pytest.raises(ValueError, match="at most 256"):
        tape.attend(Place(x), Place(x), AttentionLayer(cache, cache, 4, 1, None, 1.0))


@every_library
def test_a_table_that_is_too_short_is_refused(library: NativeLibrary) -> None:
    with pytest.raises(ValueError, match="a table of 1 blocks"):
        TapeStep([1], [ChunkRows(4, 1, [0])], [], 4)
