"""What launchers refuse, and the rules of tiles and splits; no kernel runs here."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is an optional extra: pip install pdserve[triton]")

from pdserve.kernels.ragged import ChunkRows
from pdserve.kernels.triton import gumbel_max
from pdserve.kernels.triton.cache import PagedCache, has_float8
from pdserve.kernels.triton.kv_quantize import write_quantized_kv
from pdserve.kernels.triton.kv_write import write_kv
from pdserve.kernels.triton.paged_attention import PagedPlan
from pdserve.kernels.triton.paged_decode import DecodeRows, paged_decode
from pdserve.kernels.triton.paged_prefill import PrefillChunks, paged_prefill
from pdserve.kernels.triton.rms_norm import rms_norm
from pdserve.kernels.triton.rope import rotate
from pdserve.kernels.triton.silu_mul import silu_mul
from pdserve.kernels.triton.tiles import (
    MAX_SPLITS,
    SPLIT_POSITIONS,
    Tile,
    decode_tile,
    num_splits,
    prefill_tile,
)
from pdserve.kernels.triton.wire_pack import gather_layers, scatter_layers

HALF = torch.bfloat16


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


CACHE = PagedCache(floats(32, 2, 8), floats(32, 2, 4), 16)
BYTES = PagedCache(
    floats(32, 2, 8, dtype=torch.int8), floats(32, 2, 4, dtype=torch.int8), 16, floats(32, 2), floats(32, 2)
)
ROWS = DecodeRows(ints(0), ints(1), ints(0)[None], 1)
CHUNKS = PrefillChunks(ints(0), ints(1), ints(0), ints(0)[None], 1)
PAIRS = [(floats(9, 2, 8), floats(9, 2, 4))]


def decode(
    cache: PagedCache = CACHE,
    rows: DecodeRows = ROWS,
    query: Tensor | None = None,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    query = floats(1, 4, 8) if query is None else query
    out = floats(1, 4, 4) if out is None else out
    paged_decode(query, cache, rows, out, window=None, scaling=1.0, softcap=None, sinks=sinks, tile=tile)


def prefill(chunks: PrefillChunks, tile: Tile | None = None) -> None:
    paged_prefill(
        *(floats(1, 4, 8), CACHE, chunks, floats(1, 4, 4)),
        window=None,
        scaling=1.0,
        softcap=None,
        sinks=None,
        tile=tile,
    )


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "keys of other heads": (lambda: write_kv(*PAIRS[0], floats(1, 3, 8), floats(1, 2, 4), longs(0)), "do not fit"),
    "slots too few": (lambda: write_kv(*PAIRS[0], floats(2, 2, 8), floats(2, 2, 4), longs(0)), "do not fit"),
    "keys of another type": (
        lambda: write_kv(*PAIRS[0], floats(1, 2, 8, dtype=HALF), floats(1, 2, 4), longs(0)),
        "keys are torch.bfloat16",
    ),
    "strided dims": (
        lambda: write_kv(*PAIRS[0], floats(1, 2, 16)[..., ::2], floats(1, 2, 4), longs(0)),
        "keys has stride 2",
    ),
    "two devices": (
        lambda: write_kv(*PAIRS[0], floats(1, 2, 8).to("meta"), floats(1, 2, 4), longs(0)),
        "lie on several devices",
    ),
    "no scales": (
        lambda: write_quantized_kv(replace(BYTES, value_scales=None), floats(1, 2, 8), floats(1, 2, 4), longs(0)),
        "needs float32 scales",
    ),
    "scales beside floats": (lambda: decode(replace(CACHE, key_scales=floats(32, 2))), "has no scales"),
    "bytes without scales": (lambda: decode(replace(BYTES, key_scales=None)), "needs float32 scales"),
    "scales of a transposed layout": (lambda: decode(replace(BYTES, key_scales=floats(2, 32).t())), "stride"),
    "query of another dim": (lambda: decode(query=floats(1, 4, 9)), "does not fit cache"),
    "query of another type": (
        lambda: decode(query=floats(1, 4, 8, dtype=HALF), out=floats(1, 4, 4, dtype=HALF)),
        "cache is torch.float32",
    ),
    "heads that KV heads do not divide": (lambda: decode(query=floats(1, 5, 8), out=floats(1, 5, 4)), "does not fit"),
    "out of another dim": (lambda: decode(out=floats(1, 4, 8)), "out"),
    "sinks of other heads": (lambda: decode(sinks=floats(3)), "sinks are not"),
    "64-bit lengths": (lambda: decode(rows=replace(ROWS, lengths=longs(1))), "lengths is torch.int64"),
    "tables of other sequences": (lambda: decode(rows=replace(ROWS, block_tables=floats(2, 1).int())), "block_tables"),
    "a decode tile under the group": (lambda: decode(tile=Tile(1, 16, 1, 1)), "does not hold 2 heads"),
    "starts of other chunks": (lambda: prefill(replace(CHUNKS, starts=ints(0, 0))), "starts"),
    "a prefill tile under the group": (lambda: prefill(CHUNKS, Tile(1, 16, 1, 1)), "does not hold 2 heads"),
    "wire too short": (lambda: gather_layers(PAIRS, longs(0), torch.zeros(95, dtype=torch.uint8)), "is 96 bytes"),
    "wire of floats": (lambda: scatter_layers(PAIRS, longs(0), floats(96)), "wire is torch.float32"),
    "32-bit slots": (lambda: gather_layers(PAIRS, ints(0), torch.zeros(96, dtype=torch.uint8)), "slots is torch.int32"),
    "weight of another width": (lambda: rms_norm(floats(2, 8), floats(7), 1e-5), "does not fit"),
    "residual of other rows": (lambda: rms_norm(floats(2, 8), floats(8), 1e-5, residual=floats(3, 8)), "residual"),
    "integer rows": (lambda: rms_norm(longs(1)[None], floats(1), 1e-5), "x is torch.int64"),
    "odd rotary dims": (lambda: rotate(floats(1, 2, 8), floats(1, 5), floats(1, 5)), "5 rotary dims"),
    "more rotary dims than dims": (lambda: rotate(floats(1, 2, 8), floats(1, 10), floats(1, 10)), "10 rotary dims"),
    "gate and up that differ": (lambda: silu_mul(floats(2, 8), floats(2, 7)), "does not fit up"),
    "logits of 16 bits": (
        lambda: gumbel_max.draw(floats(1, 8, dtype=HALF), floats(1).double(), longs(1), ints(0), ints(0)),
        "logits is torch.bfloat16",
    ),
    "temperatures of 32 bits": (
        lambda: gumbel_max.draw(floats(1, 8), floats(1), longs(1), ints(0), ints(0)),
        "temperatures is torch.float32",
    ),
    "seeds of other rows": (lambda: gumbel_max.uniform(longs(1, 2), ints(0), ints(0), 8), "differ in shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_a_kernel_sees_it(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_to_do_launches_nothing() -> None:
    write_kv(*PAIRS[0], floats(0, 2, 8), floats(0, 2, 4), longs())
    gather_layers(PAIRS, longs(), torch.zeros(0, dtype=torch.uint8))
    assert rms_norm(floats(0, 8), floats(8), 1e-5).shape == (0, 8)
    assert silu_mul(floats(0, 8), floats(0, 8)).shape == (0, 8)


def test_a_plan_parts_single_rows_from_chunks() -> None:
    plan = PagedPlan.of(
        [ChunkRows(4, 3, [5, 1]), ChunkRows(9, 1, [2, 3, 4]), ChunkRows(0, 2, [6])], torch.device("cpu")
    )
    assert plan.num_rows == 6
    assert plan.decode is not None
    assert plan.prefill is not None
    assert (plan.decode.rows.tolist(), plan.decode.lengths.tolist(), plan.decode.max_length) == ([3], [10], 10)
    assert plan.decode.block_tables.tolist() == [[2, 3, 4]]
    assert plan.prefill.first_rows.tolist() == [0, 4]
    assert plan.prefill.num_rows.tolist() == [3, 2]
    assert plan.prefill.starts.tolist() == [4, 0]
    assert plan.prefill.block_tables.tolist() == [[5, 1], [6, -1]]
    assert plan.prefill.max_rows == 3


def test_splits_follow_the_context_as_well_as_the_batch() -> None:
    assert num_splits(1, 8, 100, 132) == 1, "short contexts stay whole"
    assert num_splits(1, 8, 8192, 132) == 32, "a long one is cut into parts that are worth it"
    assert num_splits(1, 1, 10**6, 132) == MAX_SPLITS
    assert num_splits(64, 8, 131072, 132) == 2, "a medium batch does not fill its last wave"
    assert num_splits(512, 8, 131072, 132) == 1, "a large batch fills the device by itself"
    assert num_splits(1, 8, SPLIT_POSITIONS + 1, 132) == 2
    assert num_splits(0, 8, 0, 132) == 1


@pytest.mark.parametrize("group", [1, 3, 5, 8, 16, 71])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_tiles_hold_a_group_and_fit_matrix_units(group: int, dim: int, element_bytes: int) -> None:
    for tile in (
        decode_tile(group, dim, element_bytes),
        *(prefill_tile(n, group, dim, max(2, element_bytes), element_bytes) for n in (1, 9, 4096)),
    ):
        assert tile.rows >= max(16, group)
        assert tile.positions >= 32
        assert tile.rows & (tile.rows - 1) == tile.positions & (tile.positions - 1) == 0
        # Keys and values of every stage, at the smallest shared memory served (AMD's 64 KiB).
        assert 2 * tile.num_stages * tile.positions * dim * element_bytes <= 160 * 1024


def test_float8_needs_a_device_that_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {"a100": (8, 0), "l40": (8, 9), "h100": (9, 0)}
    for card, expected in (("a100", False), ("l40", True), ("h100", True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, card=card: capability[card])
        assert has_float8(torch.device("cuda")) is expected
    assert has_float8(torch.device("cpu"))
