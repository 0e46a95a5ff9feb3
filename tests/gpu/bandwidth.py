"""Bytes that each operation must move, over the time it takes, as a share of a copy's rate in the same run."""

from collections.abc import Callable, Iterator

import torch

from pdserve.core.work import Sampling
from pdserve.kernels.logits import SampledRow
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.kv_write import write_kv
from pdserve.kernels.triton.paged_decode import DecodeRows, paged_decode
from pdserve.kernels.triton.rms_norm import rms_norm
from pdserve.kernels.triton.rope import rotate
from pdserve.kernels.triton.silu_mul import silu_mul
from pdserve.kernels.triton.wire_pack import gather_layers, scatter_layers
from pdserve.kernels.triton_backend import draw_rows
from tests.gpu.measure import Yardstick, seconds

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
BF16 = torch.bfloat16
DECODES = ((1, 65536), (8, 8192), (16, 4096), (64, 1024), (64, 4096))
"""Batch and context; their product is at least 64k."""
TARGET = 0.8


def operations(device: torch.device, scale: int = 1) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield name, bytes moved, and call; `scale` divides the sizes, for a dry run."""
    for batch, full in DECODES:
        context = full // scale
        yield f"decode {batch} x {context}", *_decode(device, batch, context)
    rows = 16384 // scale
    hidden = torch.randn(rows, 4096, dtype=BF16, device=device)
    weight, residual = torch.ones(4096, dtype=BF16, device=device), torch.zeros_like(hidden)
    yield "RMSNorm + residual", 4 * hidden.nbytes, lambda: rms_norm(hidden, weight, 1e-5, residual=residual)
    up = torch.ones_like(hidden)  # another tensor: what is read twice comes from the cache
    yield "SiLU-mul", 3 * hidden.nbytes, lambda: silu_mul(hidden, up)
    query = torch.randn(rows, HEADS, DIM, dtype=BF16, device=device)
    angles = torch.ones(rows, DIM, dtype=BF16, device=device)
    yield "RoPE", 2 * query.nbytes, lambda: rotate(query, angles, angles)
    caches = [torch.zeros(2 * rows, KV_HEADS, DIM, dtype=BF16, device=device) for _ in range(2)]
    new, values = (torch.ones(rows, KV_HEADS, DIM, dtype=BF16, device=device) for _ in range(2))
    slots = torch.randperm(2 * rows, device=device)[:rows]
    yield "KV write", 4 * new.nbytes, lambda: write_kv(caches[0], caches[1], new, values, slots)
    pair = [(caches[0], caches[1])]
    wire = torch.empty(2 * new.nbytes, dtype=torch.uint8, device=device)
    yield "pack", 2 * wire.nbytes, lambda: gather_layers(pair, slots, wire)
    yield "unpack", 2 * wire.nbytes, lambda: scatter_layers(pair, slots, wire)
    scores = torch.randn(64, 128256 // scale, device=device)
    drawn = [SampledRow(Sampling(1.0, seed=row), 0, 0) for row in range(64)]
    yield "draw", 2 * scores.nbytes, lambda: draw_rows(scores, drawn)  # read for the maximum, and for the draw


def _decode(device: torch.device, batch: int, context: int) -> tuple[int, Callable[[], object]]:
    width = -(-context // BLOCK)
    keys, values = (torch.randn(batch * width * BLOCK, KV_HEADS, DIM, dtype=BF16, device=device) for _ in range(2))
    tables = torch.randperm(batch * width, dtype=torch.int32, device=device).view(batch, width)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    rows = DecodeRows(torch.arange(batch, dtype=torch.int32, device=device), lengths, tables, context)
    query = torch.randn(batch, HEADS, DIM, dtype=BF16, device=device)
    out = torch.empty_like(query)
    cache = PagedCache(keys, values, BLOCK)

    def call() -> None:
        paged_decode(query, cache, rows, out, window=None, scaling=DIM**-0.5, softcap=None, sinks=None)

    return keys.nbytes + values.nbytes, call


def measure_bandwidth(device: torch.device, best: Yardstick, scale: int = 1) -> Iterator[str]:
    """Yield a line per operation."""
    for name, moved, call in operations(device, scale):
        took = seconds(call, device)
        share = moved / took / best.copy_rate
        verdict = "" if not name.startswith("decode") else " (meets 80 %)" if share >= TARGET else " (BELOW 80 %)"
        yield f"{name}: {took * 1e6:.0f} us, {moved / took / 1e9:.0f} GB/s, {share:.0%} of a copy{verdict}"
