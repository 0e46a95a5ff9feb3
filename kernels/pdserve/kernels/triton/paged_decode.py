"""Causal attention of one row per sequence over a layer's paged cache, split along the positions.

Split s of a sequence takes positions P_s, a contiguous part of the visible max(0, n - window) … n - 1, and leaves

    o_s = sum_j in P_s  2^(x_j - m_s) V[slot(j)] / l_s        x_j = cap(scaling <q, K[slot(j)]>) / ln 2,  m_s = max_j x_j
    e_s = m_s + log2(l_s)                                     l_s = sum_j 2^(x_j - m_s)

and the merge, in which a learned sink is one more part that has weight and no value, gives

    out = sum_s 2^(e_s - m) o_s / (sum_s 2^(e_s - m) + 2^(sink / ln 2 - m))

One split needs no merge: the sink then seeds the running maximum. With a one-byte cache x_j is multiplied by the scale of key j,
and its weight by the scale of value j: the cache itself is never unpacked. The reference is `paged_attention`. Sources:
FlashDecoding (Dao et al. 2023), arXiv:2309.17453 for sinks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.arguments import check, check_dtype, check_together
from pdserve.kernels.triton.cache import LOG2_E, Heads, PagedCache
from pdserve.kernels.triton.tiles import Tile, decode_tile, num_splits


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences of which one row each is attended: `rows` [batch], where it lies in the query; `lengths` [batch], the positions
    it sees without a window, its own among them; `block_tables` [batch, width]. All int32.

    A length of 0 is a lane that only fills a captured graph: its output is 0. `max_length` bounds the lengths.
    """

    rows: Tensor
    lengths: Tensor
    block_tables: Tensor
    max_length: int


@triton.jit
def split_kernel(  # long: one pass over the positions, written once
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_tables,
    lengths,
    rows,
    sinks,
    out,
    partials,
    log_sums,
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
    num_heads,
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
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Attend the heads of one KV head to one split; grid (batch, kv_heads, SPLITS)."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    visible = 0
    if WINDOW > 0:
        visible = tl.maximum(length - WINDOW, 0)
    part = tl.cdiv(tl.cdiv(length - visible, SPLITS), POSITIONS) * POSITIONS
    first = visible + split * part
    stop = tl.minimum(first + part, length)

    members = tl.arange(0, ROWS)
    heads = kv_head * GROUP + members
    is_head = members < GROUP
    key_dims = tl.arange(0, KEY_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    is_key = key_dims < KEY_DIM
    is_value = value_dims < VALUE_DIM
    q = tl.load(
        query + row * s_query_row + heads[:, None] * s_query_head + key_dims[None, :],
        mask=is_head[:, None] & is_key[None, :],
        other=0.0,
    )  # [ROWS, KEY_PAD]
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS and SPLITS == 1:
        largest = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    mix = tl.zeros([ROWS, VALUE_PAD], tl.float32)

    for start in range(first, stop, POSITIONS):
        positions = start + tl.arange(0, POSITIONS)
        is_seen = positions < stop
        page = tl.load(
            block_tables + sequence * s_table + positions // BLOCK_SIZE, mask=is_seen, other=0
        )  # [POSITIONS]
        slot = page.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        k = tl.load(
            key_cache + slot[None, :] * s_key_slot + kv_head * s_key_head + key_dims[:, None],
            mask=is_seen[None, :] & is_key[:, None],
            other=0.0,
        )  # [KEY_PAD, POSITIONS]
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scaling
        if HAS_SCALES:
            k_scale = tl.load(key_scales + slot * s_scale_slot + kv_head, mask=is_seen, other=0.0)  # [POSITIONS]
            scores *= k_scale[None, :]
        if HAS_CAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
        scores = tl.where(is_seen[None, :], scores * LOG2_E, -float("inf"))
        # Every tile of a split holds a position that all rows see, so that the maximum is finite.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            value_cache + slot[:, None] * s_value_slot + kv_head * s_value_head + value_dims[None, :],
            mask=is_seen[:, None] & is_value[None, :],
            other=0.0,
        )  # [POSITIONS, VALUE_PAD]
        if HAS_SCALES:
            v_scale = tl.load(value_scales + slot * s_scale_slot + kv_head, mask=is_seen, other=0.0)  # [POSITIONS]
            weights *= v_scale[None, :]
        mix = mix * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        largest = new_largest

    divisor = tl.where(total > 0.0, total, 1.0)
    mix = mix / divisor[:, None]
    mask = is_head[:, None] & is_value[None, :]
    if SPLITS == 1:
        place = out + row * s_out_row + heads[:, None] * s_out_head + value_dims[None, :]
        tl.store(place, mix.to(out.dtype.element_ty), mask=mask)
    else:
        log_sum = tl.where(total > 0.0, largest + tl.log2(divisor), -float("inf"))
        cell = (sequence * num_heads + heads) * SPLITS + split  # [ROWS]
        tl.store(partials + cell[:, None] * VALUE_DIM + value_dims[None, :], mix, mask=mask)
        tl.store(log_sums + cell, log_sum, mask=is_head)


@triton.jit
def merge_kernel(
    partials,
    log_sums,
    rows,
    sinks,
    out,
    s_out_row,
    s_out_head,
    num_heads,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """Join the splits of one head; grid (batch, heads)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(rows + sequence).to(tl.int64)
    splits = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, VALUE_PAD)
    is_split = splits < SPLITS
    is_dim = dims < VALUE_DIM
    cell = (sequence * num_heads + head) * SPLITS + splits
    log_sum = tl.load(log_sums + cell, mask=is_split, other=-float("inf"))  # [SPLITS_PAD]
    part = tl.load(
        partials + cell[:, None] * VALUE_DIM + dims[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0
    )  # [SPLITS_PAD, VALUE_PAD]
    largest = tl.max(log_sum, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    # An empty sequence has no maximum, and its weights shall be 0, not NaN.
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp2(log_sum - largest)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - largest)
    mix = tl.sum(part * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * s_out_row + head * s_out_head + dims, mix.to(out.dtype.element_ty), mask=is_dim)


def paged_decode(  # long: most lines are the kernel's arguments, one each
    query: Tensor,
    cache: PagedCache,
    batch: DecodeRows,
    out: Tensor,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Write rows `batch.rows` of `out` [rows, heads, value_dim] from those of `query` [rows, heads, key_dim].

    `sinks` is [heads]. `splits` and `tile` are chosen from the shapes and the device where not given. Raises ValueError if
    shapes, types, strides or devices disagree.
    """
    heads = Heads.of(query, cache, out, sinks)
    check_batch(query, batch)
    num_sequences = batch.lengths.shape[0]
    if num_sequences == 0:
        return
    tile = tile or decode_tile(heads.group, heads.pad, cache.keys.element_size())
    check(tile.rows >= heads.group, f"a tile of {tile.rows} rows does not hold {heads.group} heads")
    splits = splits or num_splits(num_sequences, heads.num_kv, _seen(batch.max_length, window), num_sms(query.device))
    merged = splits > 1
    cells = (num_sequences, heads.num, splits) if merged else (1, 1, 1)
    partials = torch.empty((*cells, heads.value_dim), dtype=torch.float32, device=query.device)
    log_sums = torch.empty(cells, dtype=torch.float32, device=query.device)
    split_kernel[(num_sequences, heads.num_kv, splits)](
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        batch.block_tables,
        batch.lengths,
        batch.rows,
        sinks,
        out,
        partials,
        log_sums,
        scaling,
        1.0 if softcap is None else softcap,
        *query.stride()[:2],
        *cache.keys.stride()[:2],
        *cache.values.stride()[:2],
        0 if cache.key_scales is None else cache.key_scales.stride(0),
        batch.block_tables.stride(0),
        *out.stride()[:2],
        heads.num,
        **heads.constants(),
        BLOCK_SIZE=cache.block_size,
        WINDOW=window or 0,
        HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=cache.key_scales is not None,
        SPLITS=splits,
        ROWS=tile.rows,
        POSITIONS=tile.positions,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if merged:
        _merge(partials, log_sums, batch, sinks, out, heads)


def _merge(
    partials: Tensor, log_sums: Tensor, batch: DecodeRows, sinks: Tensor | None, out: Tensor, heads: Heads
) -> None:
    """Join `partials` [batch, heads, splits, value_dim] by `log_sums` [batch, heads, splits] into the rows of `out`."""
    num_sequences, num_heads, splits = log_sums.shape
    merge_kernel[(num_sequences, num_heads)](
        partials,
        log_sums,
        batch.rows,
        sinks,
        out,
        *out.stride()[:2],
        num_heads,
        VALUE_DIM=heads.value_dim,
        VALUE_PAD=heads.value_pad,
        HAS_SINKS=sinks is not None,
        SPLITS=splits,
        SPLITS_PAD=triton.next_power_of_2(splits),
        num_warps=4,
    )


def check_batch(query: Tensor, batch: DecodeRows) -> None:
    """Raise ValueError unless the tensors of `batch` fit each other and lie where the query does."""
    check_together(query=query, rows=batch.rows, lengths=batch.lengths, block_tables=batch.block_tables)
    for name, tensor in (("rows", batch.rows), ("lengths", batch.lengths), ("block_tables", batch.block_tables)):
        check_dtype(name, tensor, torch.int32)
        check(tensor.shape[0] == batch.lengths.shape[0], f"{name} {tuple(tensor.shape)} of {batch.lengths.shape[0]}")


def num_sms(device: torch.device) -> int:
    """Return the multiprocessors of a device; 1 where there are none."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _seen(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)
