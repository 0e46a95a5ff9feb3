"""Attention of a whole step: single rows by `paged_decode`, longer chunks by `paged_prefill`, from one plan.

The plan is made once per step, and serves all layers and windows. The reference is `paged_attention`, one folder up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.ragged import ChunkRows
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.paged_decode import DecodeRows, paged_decode
from pdserve.kernels.triton.paged_prefill import PrefillChunks, paged_prefill


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """What the kernels need to know of a step's chunks, on the device; None where there are no such chunks."""

    num_rows: int
    decode: DecodeRows | None
    prefill: PrefillChunks | None

    @classmethod
    def of(cls, chunks: Sequence[ChunkRows], device: torch.device) -> "PagedPlan":
        """Return the plan of chunks whose rows follow each other in the query."""
        placed: list[tuple[int, ChunkRows]] = []
        row = 0
        for chunk in chunks:
            placed.append((row, chunk))
            row += chunk.num_rows
        decode = [item for item in placed if item[1].num_rows == 1]
        prefill = [item for item in placed if item[1].num_rows > 1]
        return cls(row, _decode(decode, device) if decode else None, _prefill(prefill, device) if prefill else None)


def paged_attention(
    query: Tensor,
    cache: PagedCache,
    plan: PagedPlan,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [rows, heads, value_dim] for `query` [rows, heads, key_dim]; the cache holds the rows' own keys and values.

    Raises ValueError if shapes, types, strides or devices disagree.
    """
    if query.shape[0] != plan.num_rows:
        raise ValueError(f"query {tuple(query.shape)} does not fit {plan.num_rows} rows")
    out = query.new_empty(query.shape[0], query.shape[1], cache.values.shape[2])
    if plan.decode is not None:
        paged_decode(query, cache, plan.decode, out, window=window, scaling=scaling, softcap=softcap, sinks=sinks)
    if plan.prefill is not None:
        paged_prefill(query, cache, plan.prefill, out, window=window, scaling=scaling, softcap=softcap, sinks=sinks)
    return out


def _decode(placed: Sequence[tuple[int, ChunkRows]], device: torch.device) -> DecodeRows:
    return DecodeRows(
        _ints([row for row, _ in placed], device),
        _ints([chunk.stop for _, chunk in placed], device),
        block_tables([chunk.block_ids for _, chunk in placed], device),
        max(chunk.stop for _, chunk in placed),
    )


def _prefill(placed: Sequence[tuple[int, ChunkRows]], device: torch.device) -> PrefillChunks:
    return PrefillChunks(
        _ints([row for row, _ in placed], device),
        _ints([chunk.num_rows for _, chunk in placed], device),
        _ints([chunk.start for _, chunk in placed], device),
        block_tables([chunk.block_ids for _, chunk in placed], device),
        max(chunk.num_rows for _, chunk in placed),
    )


def block_tables(tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return page ids [sequences, longest table], int32; what lies behind a shorter table's end is never read."""
    width = max(map(len, tables), default=0)
    return torch.tensor([[*table, *[-1] * (width - len(table))] for table in tables], dtype=torch.int32).to(device)


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)
