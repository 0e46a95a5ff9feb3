"""Shapes of real models, and random steps of them, for the native check and for the script that runs on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.ragged import ChunkRows
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.kv_quantize import quantize_reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NUM_BLOCKS = 64


@dataclass(frozen=True)
class Shape:
    """Heads of a model, and what its attention adds."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


SHAPES = {
    "smollm2": Shape(9, 3, 64, torch.float32),
    "smollm2-bf16": Shape(9, 3, 64, torch.bfloat16, block_size=32),
    "odd heads, window, cap": Shape(8, 4, 40, torch.float16, block_size=8, window=37, softcap=30.0),
    "sinks, window": Shape(12, 4, 64, torch.bfloat16, window=128, has_sinks=True),
    "phi-3": Shape(32, 32, 96, torch.float16),
    "llama-8b": Shape(32, 8, 128, torch.bfloat16),
    "gemma2": Shape(8, 4, 256, torch.bfloat16, window=128, softcap=50.0),
}


def caches_of(shape: Shape, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Random caches whose first block, which no sequence owns, is NaN."""
    size = (NUM_BLOCKS * shape.block_size, shape.kv_heads, shape.dim)
    keys, values = (torch.randn(size).to(dtype or shape.dtype) for _ in range(2))
    for cache in (keys, values):
        cache[: shape.block_size] = float("nan")
    return keys, values


def chunks_of(shape: Shape, spans: list[tuple[int, int]]) -> list[ChunkRows]:
    """Chunks of (start, rows), with scattered blocks; the longest sequence last, its table without a spare entry."""
    free = (torch.randperm(NUM_BLOCKS - 1) + 1).tolist()
    chunks = []
    for start, rows in spans:
        needed = -(-(start + rows) // shape.block_size)
        chunks.append(ChunkRows(start, rows, [free.pop() for _ in range(needed)]))
    return chunks


def one_byte_of(shape: Shape, stored: torch.dtype) -> tuple[PagedCache, tuple[Tensor, Tensor]]:
    """A random cache in one byte, and the keys and values that it means; what no sequence owns is huge."""
    numbers, scales, meant = [], [], []
    for cache in caches_of(shape, torch.float32):
        quantized, scale = quantize_reference(cache.nan_to_num(1e6), stored)
        numbers.append(quantized)
        scales.append(scale)
        meant.append((quantized.float() * scale[..., None]).to(shape.dtype))
    return PagedCache(numbers[0], numbers[1], shape.block_size, scales[0], scales[1]), (meant[0], meant[1])
