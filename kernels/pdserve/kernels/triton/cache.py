"""A layer's paged cache as the attention kernels take it, and the head counts and dims that follow."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import FLOATS, check, check_dtype, check_together

LOG2_E = tl.constexpr(math.log2(math.e))
"""Kernels take powers of 2, which devices have, instead of e."""
ONE_BYTE = (torch.int8, torch.float8_e4m3fn)
"""Types of caches that need scales."""
MIN_DIM = 16
"""Smallest inner dimension of a matrix product; smaller heads are padded."""


@dataclass(frozen=True, slots=True)
class PagedCache:
    """`keys` [slots, kv_heads, key_dim] and `values` [slots, kv_heads, value_dim] of one layer.

    A cache of one-byte elements has `key_scales` and `value_scales` [slots, kv_heads] in float32 (see `kv_quantize`): what is
    stored times its scale is the number meant.
    """

    keys: Tensor
    values: Tensor
    block_size: int
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """Counts and dims that query and cache agree on."""

    num: int
    num_kv: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, query: Tensor, cache: PagedCache, out: Tensor, sinks: Tensor | None) -> "Heads":
        """Return them, or raise ValueError if shapes, types, strides or devices disagree."""
        check_together(
            query=query,
            out=out,
            keys=cache.keys,
            values=cache.values,
            sinks=sinks,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
        )
        check_dtype("query", query, *FLOATS)
        check_dtype("out", out, query.dtype)
        check_dtype("values", cache.values, cache.keys.dtype)
        heads = cls(query.shape[1], cache.keys.shape[1], query.shape[2], cache.values.shape[2])
        shape = f"query {tuple(query.shape)} does not fit cache {tuple(cache.keys.shape)}"
        check(cache.keys.shape[2] == heads.key_dim and heads.num % heads.num_kv == 0, shape)
        check(cache.values.shape[:2] == cache.keys.shape[:2], "the two caches differ in slots or KV heads")
        check(
            out.shape == (query.shape[0], heads.num, heads.value_dim), f"out {tuple(out.shape)} does not fit the query"
        )
        check(sinks is None or sinks.shape == (heads.num,), f"sinks are not [{heads.num}]")
        heads.check_scales(query, cache)
        return heads

    def check_scales(self, query: Tensor, cache: PagedCache) -> None:
        """Raise ValueError unless the cache has the query's type, or one byte and scales for each slot and KV head."""
        scales = (cache.key_scales, cache.value_scales)
        if cache.keys.dtype not in ONE_BYTE:
            check_dtype("cache", cache.keys, query.dtype)
            check(scales == (None, None), f"a cache of {cache.keys.dtype} has no scales")
            return
        for tensor in scales:
            if tensor is None or tensor.shape != cache.keys.shape[:2] or tensor.dtype != torch.float32:
                raise ValueError(f"a cache of {cache.keys.dtype} needs float32 scales {tuple(cache.keys.shape[:2])}")
            check(tensor.is_contiguous(), "scales are not contiguous")
        check(
            cache.keys.dtype != torch.float8_e4m3fn or has_float8(query.device),
            "this device computes no float8 (e4m3): it needs compute capability 8.9; store the cache as int8",
        )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num // self.num_kv

    @property
    def key_pad(self) -> int:
        """The key dim, padded to what a matrix product takes."""
        return max(MIN_DIM, int(triton.next_power_of_2(self.key_dim)))

    @property
    def value_pad(self) -> int:
        """The value dim, padded to what a matrix product takes."""
        return max(MIN_DIM, int(triton.next_power_of_2(self.value_dim)))

    @property
    def pad(self) -> int:
        """The larger of the two padded dims."""
        return max(self.key_pad, self.value_pad)

    def constants(self) -> dict[str, int]:
        """Return what both attention kernels are compiled for."""
        return {
            "GROUP": self.group,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "KEY_PAD": self.key_pad,
            "VALUE_PAD": self.value_pad,
        }


def has_float8(device: torch.device) -> bool:
    """Return whether kernels that convert float8 (e4m3) compile for the device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
