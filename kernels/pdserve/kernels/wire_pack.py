"""Gather cached positions into the canonical wire form, and scatter them back.

    wire = for each layer: K[slots] as [token, kv_head, key_dim], then V[slots] as [token, kv_head, value_dim]

contiguous, in the cache's own dtype and the machine's little-endian order. Neither block size nor block order shows on the
wire: both sides speak of token positions, and each maps them to its own slots.
"""

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Payloads are read-only buffers, and are only read here. torch warns of the first such buffer of a process: let it be this.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)


def pack_layers(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, into: memoryview) -> None:
    """Write the wire form of `slots` [tokens] of each (key, value) cache `[slots, kv_heads, dim]` into `into`.

    `slots` lies on the caches' device, `into` in host memory. Writes in place; makes no copy on the CPU. Raises
    ValueError unless `into` is writable and has exactly the needed bytes.
    """
    for cache, part in _parts(caches, slots, into):
        rows = cache.view(cache.shape[0], -1)
        if cache.device.type == "cpu":
            torch.index_select(rows, 0, slots, out=part.view(slots.shape[0], -1))
        else:
            part.copy_(rows.index_select(0, slots).flatten())


def unpack_layers(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, payload: memoryview) -> None:
    """Write the wire form in `payload` into `slots` [tokens] of each (key, value) cache; the inverse of `pack_layers`.

    `slots` lies on the caches' device, `payload` in host memory. Raises ValueError unless `payload` has
    exactly the needed bytes.
    """
    for cache, part in _parts(caches, slots, payload):
        cache.view(cache.shape[0], -1).index_copy_(0, slots, part.view(slots.shape[0], -1).to(cache.device))


def _parts(
    caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor, buffer: memoryview
) -> Iterator[tuple[Tensor, Tensor]]:
    tokens = slots.shape[0]
    sizes = [tokens * cache[0].numel() * cache.element_size() for pair in caches for cache in pair]
    if buffer.nbytes != sum(sizes):
        raise ValueError(
            f"wire form of {tokens} tokens and {len(caches)} layers is {sum(sizes)} bytes, not {buffer.nbytes}"
        )
    if tokens == 0:
        return
    flat, offset = buffer.cast("B"), 0
    for cache, size in zip((cache for pair in caches for cache in pair), sizes, strict=True):
        yield cache, torch.frombuffer(flat[offset : offset + size], dtype=cache.dtype)
        offset += size


def pack_layers_reference(caches: Sequence[tuple[Tensor, Tensor]], slots: Tensor) -> bytes:
    """Return the wire form, made element by element of the formula with plain indexing and copies."""
    wire = bytearray()
    for pair in caches:
        for cache in pair:
            for slot in slots.tolist():
                wire += cache[slot].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return bytes(wire)
