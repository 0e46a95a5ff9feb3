"""Every kernel at the configurations that its launcher gives it for real models.

Launchers are called on tensors of the device `meta`, which have shapes and no memory; what they would launch is compiled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.gumbel_max import draw, uniform
from pdserve.kernels.triton.kv_quantize import write_quantized_kv
from pdserve.kernels.triton.kv_write import write_kv
from pdserve.kernels.triton.paged_decode import DecodeRows, paged_decode
from pdserve.kernels.triton.paged_prefill import PrefillChunks, paged_prefill
from pdserve.kernels.triton.rms_norm import rms_norm
from pdserve.kernels.triton.rope import rotate
from pdserve.kernels.triton.silu_mul import silu_mul
from pdserve.kernels.triton.wire_pack import gather_layers, scatter_layers

BF16, FP32, INT8, FP8 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
SLOTS = 1 << 16
BATCH = 64
SPLITS = 8


@dataclass(frozen=True)
class Case:
    """One launch of a launcher, and what its code must have: see `figures.FIGURES` for the names."""

    call: Callable[[], object]
    kernel: str
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By target: counts that are above 0."""
    without: tuple[str, ...] = ()
    """Targets for which it does not compile, which the product never asks of them."""


@dataclass(frozen=True)
class Model:
    """Heads of a model, and what it stores."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = BF16
    stored: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def cache(self) -> PagedCache:
        size, stored = (SLOTS, self.kv_heads), self.stored or self.dtype
        scales = [None, None] if self.stored is None else [meta(*size, dtype=FP32) for _ in range(2)]
        return PagedCache(meta(*size, self.dim, dtype=stored), meta(*size, self.dim, dtype=stored), 16, *scales)

    def sinks(self) -> Tensor | None:
        return meta(self.heads, dtype=FP32) if self.has_sinks else None

    def decode(self) -> None:
        query = meta(BATCH, self.heads, self.dim, dtype=self.dtype)
        paged_decode(
            query,
            self.cache(),
            DecodeRows(ints(BATCH), ints(BATCH), ints(BATCH, 512), 8192),
            torch.empty_like(query),
            window=self.window,
            scaling=0.1,
            softcap=self.softcap,
            sinks=self.sinks(),
            splits=SPLITS,
        )

    def prefill(self, max_rows: int = 2048) -> None:
        query = meta(4096, self.heads, self.dim, dtype=self.dtype)
        paged_prefill(
            query,
            self.cache(),
            PrefillChunks(ints(4), ints(4), ints(4), ints(4, 512), max_rows),
            torch.empty_like(query),
            window=self.window,
            scaling=0.1,
            softcap=self.softcap,
            sinks=self.sinks(),
        )

    def write(self) -> None:
        new = meta(BATCH, self.kv_heads, self.dim, dtype=self.dtype)
        slots = meta(BATCH, dtype=torch.int64)
        if self.stored is None:
            write_kv(self.cache().keys, self.cache().values, new, new, slots)
        else:
            write_quantized_kv(self.cache(), new, new, slots)

    def wire(self, move: Callable[[list[tuple[Tensor, Tensor]], Tensor, Tensor], None]) -> None:
        cache = self.cache()
        size = BATCH * 2 * self.kv_heads * self.dim * cache.keys.element_size()
        move([(cache.keys, cache.values)], meta(BATCH, dtype=torch.int64), meta(size, dtype=torch.uint8))


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def _draw(what: Callable[..., object]) -> None:
    rows = {"seeds": meta(BATCH, dtype=torch.int64), "positions": ints(BATCH), "sequences": ints(BATCH)}
    if what is uniform:
        uniform(**rows, vocabulary=49152)
    else:
        draw(meta(BATCH, 49152, dtype=FP32), meta(BATCH, dtype=torch.float64), **rows)


LLAMA, GEMMA, SMOL = Model(), Model(8, 4, 256, window=1024, softcap=50.0), Model(9, 3, 64, FP32)
GPT_OSS = Model(64, 8, 64, window=128, has_sinks=True)
INT8_KV, FP8_KV = Model(stored=INT8), Model(stored=FP8)
ROWS = meta(BATCH, 4096, dtype=BF16)
LOADS = {"sm_80": ("async128",), "sm_90": ("async128",), "sm_100": ("async128",), "gfx942": ("load128", "matrix")}
"""Decode: pages are fetched 16 bytes at a time, on NVIDIA behind the products."""
PRODUCTS = {"sm_80": ("matrix",), "sm_90": ("wgmma",), "sm_100": ("tcgen05",), "gfx942": ("matrix",)}
"""Prefill: the widest matrix unit that the target has."""
COPIES = dict.fromkeys(("sm_80", "sm_90", "sm_100"), ("load128", "store128"))
"""Not on gfx942: with 64 lanes a warp, rows of these sizes are 8 bytes a lane."""

CASES = {
    "decode bf16, heads of 128": Case(LLAMA.decode, "split_kernel", LOADS),
    "decode merge": Case(LLAMA.decode, "merge_kernel"),
    "decode bf16, heads of 256, window, cap": Case(GEMMA.decode, "split_kernel", LOADS),
    "decode bf16, heads of 64, window, sinks": Case(GPT_OSS.decode, "split_kernel", LOADS),
    "decode fp32, heads of 64": Case(SMOL.decode, "split_kernel"),
    "decode int8 KV": Case(INT8_KV.decode, "split_kernel"),
    "decode fp8 KV": Case(FP8_KV.decode, "split_kernel", without=("sm_80",)),
    "prefill bf16, heads of 128": Case(LLAMA.prefill, "prefill_kernel", PRODUCTS),
    "prefill bf16, 8 rows": Case(lambda: LLAMA.prefill(8), "prefill_kernel", {"sm_80": ("matrix",)}),
    "prefill bf16, heads of 256, window, cap": Case(GEMMA.prefill, "prefill_kernel", PRODUCTS),
    "prefill bf16, heads of 64, window, sinks": Case(GPT_OSS.prefill, "prefill_kernel", PRODUCTS),
    "prefill fp32, heads of 64": Case(SMOL.prefill, "prefill_kernel"),
    "prefill int8 KV": Case(INT8_KV.prefill, "prefill_kernel", PRODUCTS),
    "prefill fp8 KV": Case(FP8_KV.prefill, "prefill_kernel", PRODUCTS, without=("sm_80",)),
    "KV write bf16": Case(LLAMA.write, "write_kernel", COPIES),
    "KV write int8": Case(INT8_KV.write, "quantize_kernel"),
    "KV write fp8": Case(FP8_KV.write, "quantize_kernel", without=("sm_80",)),
    "pack": Case(lambda: LLAMA.wire(gather_layers), "gather_kernel", COPIES),
    "unpack": Case(lambda: LLAMA.wire(scatter_layers), "scatter_kernel", COPIES),
    "RMSNorm + residual": Case(
        lambda: rms_norm(ROWS, meta(4096, dtype=BF16), 1e-5, residual=torch.empty_like(ROWS)), "norm_kernel", COPIES
    ),
    "RoPE": Case(
        lambda: rotate(meta(BATCH, 32, 128, dtype=BF16), meta(BATCH, 128, dtype=BF16), meta(BATCH, 128, dtype=BF16)),
        "rope_kernel",
    ),
    "SiLU-mul": Case(lambda: silu_mul(ROWS, ROWS), "silu_mul_kernel", COPIES),
    "draw": Case(lambda: _draw(draw), "draw_kernel"),
    "draw, second pass": Case(lambda: _draw(draw), "choose_kernel"),
    "uniforms": Case(lambda: _draw(uniform), "uniform_kernel"),
}
