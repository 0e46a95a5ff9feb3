"""Causal attention of ragged chunks of rows over a layer's paged cache.

For row r of a chunk, at position p, and head h, with KV head g = h // group:

    x_j = cap(scaling <q[r, h], K[slot(j), g]>) / ln 2          j in max(0, p - window + 1) … p
    out[r, h] = sum_j 2^(x_j - m) V[slot(j), g] / (sum_j 2^(x_j - m) + 2^(sink[h] / ln 2 - m))

with the running maximum m of an online softmax, which a sink seeds. A program takes some tokens of a chunk with all query heads
of one KV head: its matrix products have `tokens * group` rows, and keys are read once for the group. The reference is
`paged_attention`. Source: FlashAttention-2 (arXiv:2307.08691).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import check, check_dtype, check_together
from pdserve.kernels.triton.cache import LOG2_E, Heads, PagedCache
from pdserve.kernels.triton.tiles import Tile, prefill_tile


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Chunks of rows: `first_rows` [chunks], where each begins in the query; `num_rows` [chunks]; `starts` [chunks], the
    absolute position of its first row; `block_tables` [chunks, width]. All int32. `max_rows` bounds `num_rows`.

    The cache already holds the rows' own keys and values. A chunk of no rows is lawful and writes nothing.
    """

    first_rows: Tensor
    num_rows: Tensor
    starts: Tensor
    block_tables: Tensor
    max_rows: int


@triton.jit
def prefill_kernel(  # long: one pass over the positions, written once
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_tables,
    first_rows,
    num_rows,
    starts,
    sinks,
    out,
    scaling,
    softcap,
    s_query_row,
    s_query_head,
    s_key_slot,
    s_key_head,
    s_value_slot,
    s_value_head,
    s_scale_slot,
    s_table,
    s_out_row,
    s_out_head,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Attend TOKENS rows of one chunk with the heads of one KV head; grid (parts of a chunk, kv_heads, chunks)."""
    TOKENS: tl.constexpr = ROWS // GROUP
    chunk = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1)
    count = tl.load(num_rows + chunk)
    first_token = tl.program_id(0) * TOKENS
    if first_token >= count:
        return
    start = tl.load(starts + chunk)
    last_token = tl.minimum(first_token + TOKENS, count) - 1
    # Rows of the products: token 0 with its GROUP heads, token 1 …; the last ROWS % GROUP of them are idle.
    members = tl.arange(0, ROWS)
    tokens = first_token + members // GROUP
    heads = kv_head * GROUP + members % GROUP
    is_row = (members < TOKENS * GROUP) & (tokens < count)
    rows = (tl.load(first_rows + chunk) + tokens).to(tl.int64)
    places = start + tokens

    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    is_key = key_dims < KEY_DIM
    is_value = value_dims < VALUE_DIM
    q = tl.load(
        query + rows[:, None] * s_query_row + heads[:, None] * s_query_head + key_dims[None, :],
        mask=is_row[:, None] & is_key[None, :],
        other=0.0,
    )  # [ROWS, KEY_PAD]
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mix = tl.zeros([ROWS, VALUE_PAD], tl.float32)

    stop = start + last_token + 1
    visible = 0
    if WINDOW > 0:
        visible = tl.maximum(start + first_token - WINDOW + 1, 0)
    for begin in range(visible, stop, POSITIONS):
        positions = begin + tl.arange(0, POSITIONS)
        is_cached = positions < stop
        page = tl.load(block_tables + chunk * s_table + positions // BLOCK_SIZE, mask=is_cached, other=0)  # [POSITIONS]
        slot = page.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        k = tl.load(
            key_cache + slot[None, :] * s_key_slot + kv_head * s_key_head + key_dims[:, None],
            mask=is_cached[None, :] & is_key[:, None],
            other=0.0,
        )  # [KEY_PAD, POSITIONS]
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scaling
        if HAS_SCALES:
            k_scale = tl.load(key_scales + slot * s_scale_slot + kv_head, mask=is_cached, other=0.0)  # [POSITIONS]
            scores *= k_scale[None, :]
        if HAS_CAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
        is_seen = positions[None, :] <= places[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (positions[None, :] > places[:, None] - WINDOW)
        scores = tl.where(is_seen & is_cached[None, :], scores * LOG2_E, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row may see nothing of this tile, nor of those before: its maximum is then no number to subtract.
        anchor = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(largest - anchor)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            value_cache + slot[:, None] * s_value_slot + kv_head * s_value_head + value_dims[None, :],
            mask=is_cached[:, None] & is_value[None, :],
            other=0.0,
        )  # [POSITIONS, VALUE_PAD]
        if HAS_SCALES:
            v_scale = tl.load(value_scales + slot * s_scale_slot + kv_head, mask=is_cached, other=0.0)  # [POSITIONS]
            weights *= v_scale[None, :]
        mix = mix * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        largest = new_largest

    mix = mix / tl.where(total > 0.0, total, 1.0)[:, None]
    place = out + rows[:, None] * s_out_row + heads[:, None] * s_out_head + value_dims[None, :]
    tl.store(place, mix.to(out.dtype.element_ty), mask=is_row[:, None] & is_value[None, :])


def paged_prefill(
    query: Tensor,
    cache: PagedCache,
    chunks: PrefillChunks,
    out: Tensor,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    tile: Tile | None = None,
) -> None:
    """Write the chunks' rows of `out` [rows, heads, value_dim] from those of `query` [rows, heads, key_dim].

    `sinks` is [heads]. `tile` is chosen from the shapes where not given. Raises ValueError if shapes, types, strides or devices
    disagree.
    """
    heads = Heads.of(query, cache, out, sinks)
    check_chunks(query, chunks)
    num_chunks = chunks.num_rows.shape[0]
    if num_chunks == 0 or chunks.max_rows == 0:
        return
    sizes = (query.element_size(), cache.keys.element_size())
    tile = tile or prefill_tile(chunks.max_rows, heads.group, heads.pad, *sizes)
    check(tile.rows >= heads.group, f"a tile of {tile.rows} rows does not hold {heads.group} heads")
    parts = triton.cdiv(chunks.max_rows, tile.rows // heads.group)
    prefill_kernel[(parts, heads.num_kv, num_chunks)](
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        chunks.block_tables,
        chunks.first_rows,
        chunks.num_rows,
        chunks.starts,
        sinks,
        out,
        scaling,
        1.0 if softcap is None else softcap,
        *query.stride()[:2],
        *cache.keys.stride()[:2],
        *cache.values.stride()[:2],
        0 if cache.key_scales is None else cache.key_scales.stride(0),
        chunks.block_tables.stride(0),
        *out.stride()[:2],
        **heads.constants(),
        BLOCK_SIZE=cache.block_size,
        WINDOW=window or 0,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=cache.key_scales is not None,
        ROWS=tile.rows,
        POSITIONS=tile.positions,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def check_chunks(query: Tensor, chunks: PrefillChunks) -> None:
    """Raise ValueError unless the tensors of `chunks` fit each other and lie where the query does."""
    tensors = {
        "first_rows": chunks.first_rows,
        "num_rows": chunks.num_rows,
        "starts": chunks.starts,
        "block_tables": chunks.block_tables,
    }
    check_together(query=query, **tensors)
    for name, tensor in tensors.items():
        check_dtype(name, tensor, torch.int32)
        check(tensor.shape[0] == chunks.num_rows.shape[0], f"{name} {tuple(tensor.shape)} of {chunks.num_rows.shape}")
