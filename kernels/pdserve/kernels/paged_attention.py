"""Causal attention of a step's ragged rows over a layer's paged cache.

For row r at position p of its sequence, head h, KV head g = h // (heads / kv_heads):

    s_j = cap(scaling * <q[r, h], K[slot(j), g]>)           j in max(0, p - window + 1) … p
    cap(s) = softcap * tanh(s / softcap), or s without soft-capping
    out[r, h] = sum_j exp(s_j) V[slot(j), g] / (sum_j exp(s_j) + exp(sink[h]))      (the sink term only where there is one)

Sources: Gemma 2 (arXiv:2408.00118) for soft-capping, StreamingLLM (arXiv:2309.17453) and gpt-oss for learned sinks, Mistral 7B
(arXiv:2310.06825) for the sliding window.
"""

import torch
import torch.nn.functional as fn
from torch import Tensor

from pdserve.kernels.ragged import ChunkRows, DecodeGroup, PrefillGroup, RaggedPlan


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: RaggedPlan,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [rows, heads, value_dim] for `query` [rows, heads, key_dim].

    Caches are `[slots, kv_heads, dim]`, contiguous, and already hold the rows' own keys and values. `sinks` is [heads].
    Raises ValueError if shapes disagree.
    """
    rows, heads, key_dim = query.shape
    kv_heads = key_cache.shape[1]
    if rows != plan.num_rows or key_dim != key_cache.shape[2] or heads % kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit {plan.num_rows} rows and cache {tuple(key_cache.shape)}"
        )
    if value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError(f"value cache {tuple(value_cache.shape)} does not fit key cache {tuple(key_cache.shape)}")
    decode, prefill = plan.groups(window)
    out = query.new_empty(rows, heads, value_cache.shape[2])
    for group in decode:
        out[group.rows] = _attend_decode(query, key_cache, value_cache, group, scaling, softcap, sinks)
    for chunk in prefill:
        span = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        out[span] = _attend_chunk(query[span], key_cache, value_cache, chunk, scaling, softcap, sinks)
    return out


def _attend_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: DecodeGroup,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    heads, kv_heads = query.shape[1], key_cache.shape[1]
    # [batch, kv_heads, heads per KV head, dim]: the query heads of one KV head take the place of query positions.
    q = query[group.rows].view(group.batch, kv_heads, heads // kv_heads, -1)
    k = _gather(key_cache, group.gather).view(group.batch, group.length, kv_heads, -1).transpose(1, 2)
    v = _gather(value_cache, group.gather).view(group.batch, group.length, kv_heads, -1).transpose(1, 2)
    sink = None if sinks is None else sinks.view(1, kv_heads, heads // kv_heads, 1)
    return _attend(q, k, v, group.mask, scaling, softcap, sink).reshape(group.batch, heads, -1)


def _attend_chunk(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    chunk: PrefillGroup,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    heads, kv_heads = query.shape[1], key_cache.shape[1]
    per_kv = heads // kv_heads
    length = chunk.gather.shape[0]
    # [kv_heads, heads per KV head, rows, dim]; keys are shared inside a KV head by a stride of zero, not by copies.
    q = query.transpose(0, 1).view(kv_heads, per_kv, chunk.num_rows, -1)
    k = _gather(key_cache, chunk.gather).view(length, kv_heads, 1, -1).permute(1, 2, 0, 3).expand(-1, per_kv, -1, -1)
    v = _gather(value_cache, chunk.gather).view(length, kv_heads, 1, -1).permute(1, 2, 0, 3).expand(-1, per_kv, -1, -1)
    sink = None if sinks is None else sinks.view(kv_heads, per_kv, 1, 1)
    return _attend(q, k, v, chunk.mask, scaling, softcap, sink).flatten(0, 1).transpose(0, 1)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    # Rows of one dimension: torch copies them whole, several times faster than over two dimensions.
    return cache.view(cache.shape[0], -1).index_select(0, slots)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sink: Tensor | None
) -> Tensor:
    """Dense attention over [a, b, queries, dim] and [a, b, keys, dim]; mask and sink broadcast."""
    if softcap is None and sink is None:
        return fn.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sink is not None:
        scores = torch.cat([scores, sink.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sink is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, v.float()).to(q.dtype)


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    chunks: list[ChunkRows],
    block_size: int,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the same as `paged_attention`, row by row and head by head in float64."""
    per_kv = query.shape[1] // key_cache.shape[1]
    out = torch.zeros(query.shape[0], query.shape[1], value_cache.shape[2], dtype=torch.float64)
    row = 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.stop):
            first = 0 if window is None else max(0, position - window + 1)
            slots = [chunk.block_ids[j // block_size] * block_size + j % block_size for j in range(first, position + 1)]
            for head in range(query.shape[1]):
                scores = key_cache[slots, head // per_kv].double() @ query[row, head].double() * scaling
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.exp()
                total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
                out[row, head] = (weights / total) @ value_cache[slots, head // per_kv].double()
            row += 1
    return out.to(query.dtype)
