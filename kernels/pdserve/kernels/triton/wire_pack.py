"""Gather cached positions into the canonical wire form on the device, and scatter them back.

    wire = for each layer: K[slots] as [token, kv_head, key_dim], then V[slots] as [token, kv_head, value_dim]

The reference, and the form that crosses to host memory, is `wire_pack`. Rows move as integers, as wide as they allow: the kernel
need not know what they mean, and no NaN is touched. Slots are distinct.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import check, check_dtype, check_together

WIDTHS = (torch.int64, torch.int32, torch.int16, torch.int8)
MAX_WORDS = 1024
"""Words of a row that one program moves."""


@triton.jit
def gather_kernel(cache, slots, wire, num_words, WORDS: tl.constexpr):
    """Copy one part of a token's row; grid (tokens, parts)."""
    token = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    slot = tl.load(slots + token)  # int64, a scalar inside the grid
    row = tl.load(cache + slot * num_words + words, mask=words < num_words, other=0)  # [WORDS]
    tl.store(wire + token * num_words + words, row, mask=words < num_words)


@triton.jit
def scatter_kernel(cache, slots, wire, num_words, WORDS: tl.constexpr):
    """Copy one part of a token's row back; grid (tokens, parts)."""
    token = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    slot = tl.load(slots + token)  # int64, a scalar inside the grid
    row = tl.load(wire + token * num_words + words, mask=words < num_words, other=0)  # [WORDS]
    tl.store(cache + slot * num_words + words, row, mask=words < num_words)


def gather_layers(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, wire: Tensor) -> None:
    """Write the wire form of `slots` [tokens], int64, of each (key, value) cache `[slots, kv_heads, dim]` into `wire`.

    `wire` [bytes] is uint8, on the caches' device. Raises ValueError unless it has exactly the needed bytes.
    """
    for rows, part in _parts(caches, slots, wire):
        words = min(MAX_WORDS, triton.next_power_of_2(rows.shape[1]))
        grid = (slots.shape[0], triton.cdiv(rows.shape[1], words))
        gather_kernel[grid](rows, slots, part, rows.shape[1], WORDS=words, num_warps=4)


def scatter_layers(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, wire: Tensor) -> None:
    """Write the wire form in `wire` into `slots` of each (key, value) cache; the inverse of `gather_layers`."""
    for rows, part in _parts(caches, slots, wire):
        words = min(MAX_WORDS, triton.next_power_of_2(rows.shape[1]))
        grid = (slots.shape[0], triton.cdiv(rows.shape[1], words))
        scatter_kernel[grid](rows, slots, part, rows.shape[1], WORDS=words, num_warps=4)


def pack_layers(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, into: memoryview) -> None:
    """Write the wire form into host memory, by way of one buffer on the device; otherwise as `wire_pack.pack_layers`."""
    wire = torch.empty(into.nbytes, dtype=torch.uint8, device=slots.device)
    gather_layers(caches, slots, wire)
    if into.nbytes:
        torch.frombuffer(into.cast("B"), dtype=torch.uint8).copy_(wire)


def unpack_layers(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, payload: memoryview) -> None:
    """Write the wire form in host memory into the caches, by way of one buffer on the device."""
    if payload.nbytes:
        wire = torch.frombuffer(payload.cast("B"), dtype=torch.uint8)
        # On the CPU the payload is only read; a device gets its copy.
        scatter_layers(caches, slots, wire.to(slots.device))
    else:
        scatter_layers(caches, slots, torch.empty(0, dtype=torch.uint8, device=slots.device))


def _parts(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each cache as [slots, words] and its part of the wire as [tokens * words]."""
    flat = [cache for pair in caches for cache in pair]
    check_together(slots=slots, wire=wire, **{f"cache {index}": cache for index, cache in enumerate(flat)})
    check_dtype("slots", slots, torch.int64)
    check_dtype("wire", wire, torch.uint8)
    row_bytes = [cache[0].numel() * cache.element_size() for cache in flat]
    check(
        wire.numel() == slots.shape[0] * sum(row_bytes),
        f"wire form of {slots.shape[0]} tokens is {slots.shape[0] * sum(row_bytes)} bytes, not {wire.numel()}",
    )
    if slots.shape[0] == 0:
        return
    offset = 0
    for cache, size in zip(flat, row_bytes, strict=True):
        check(cache.is_contiguous(), f"cache {tuple(cache.shape)} is not contiguous")
        start, stop = offset, offset + slots.shape[0] * size
        word = next(width for width in WIDTHS if (size | start | wire.data_ptr()) % width.itemsize == 0)
        # By way of bytes: float8 views as nothing else.
        rows = cache.view(cache.shape[0], -1).view(torch.uint8).view(word)
        yield rows, wire[start:stop].view(word)
        offset = stop
