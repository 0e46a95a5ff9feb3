"""The Triton backend: attention, KV write, wire form and draws by our own kernels, and the modules that they replace.

Imported only when it is chosen, since `triton` is an optional extra. Not run on a GPU yet: docs/kernels.md says what is proven.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.backends import Backend
from pdserve.kernels.logits import SampledRow
from pdserve.kernels.ragged import ChunkRows
from pdserve.kernels.slots import slots_of
from pdserve.kernels.triton import gumbel_max, kv_write, wire_pack
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.paged_attention import PagedPlan, paged_attention
from pdserve.kernels.triton.paged_decode import DecodeRows
from pdserve.kernels.triton_modules import fuse_modules

ALIGNMENT = 16
"""Bytes; pointers that are multiples of it are loaded from in wide words."""
COLUMN_TYPES = (torch.float64, torch.int64, torch.int32, torch.int32)
"""Of a drawn row's temperature, seed, position and sequence."""


class TritonPlan:
    """The plan of a step, on the device."""

    def __init__(
        self,
        chunks: Sequence[ChunkRows],
        block_size: int,
        dtype: torch.dtype,  # noqa: ARG002 - kernels make their masks themselves, in no type
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_rows = sum(chunk.num_rows for chunk in chunks)
        self.paged = PagedPlan.of(chunks, device)
        self.positions = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).to(device)
        self.write_slots = torch.cat(
            [slots_of(chunk.block_ids, range(chunk.start, chunk.stop), block_size) for chunk in chunks]
        ).to(device)


class StaticTritonPlan:
    """The plan of `num_rows` single rows, filled again for each replay of a graph.

    Idle rows have length 0 and a negative slot: the kernels see nothing for them and write nothing.
    """

    def __init__(self, num_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.num_rows = num_rows
        self.max_length = max_length
        width = -(-max_length // block_size)
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.write_slots = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        tables = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self.paged = PagedPlan(num_rows, DecodeRows(rows, lengths, tables, max_length), None)

    def fill(self, chunks: Sequence[ChunkRows]) -> None:
        """Describe `chunks`, of one row each, in the same tensors; ValueError if they do not fit."""
        if len(chunks) > self.num_rows or any(c.num_rows != 1 or c.stop > self.max_length for c in chunks):
            raise ValueError(f"not up to {self.num_rows} single rows of up to {self.max_length} positions")
        decode = self.paged.decode
        assert decode is not None
        positions = torch.zeros(self.num_rows, dtype=torch.int64)
        slots = torch.full((self.num_rows,), -1, dtype=torch.int64)
        lengths = torch.zeros(self.num_rows, dtype=torch.int32)
        tables = torch.zeros(decode.block_tables.shape, dtype=torch.int32)
        for row, chunk in enumerate(chunks):
            positions[row], lengths[row] = chunk.start, chunk.stop
            slots[row] = slots_of(chunk.block_ids, range(chunk.start, chunk.stop), self.block_size)[0]
            used = chunk.block_ids[: -(-chunk.stop // self.block_size)]
            tables[row, : len(used)] = torch.tensor(used, dtype=torch.int32)
        self.positions.copy_(positions)
        self.write_slots.copy_(slots)
        decode.lengths.copy_(lengths)
        decode.block_tables.copy_(tables)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: TritonPlan | StaticTritonPlan,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Answer as `paged_attention.paged_attention`, from a plan of this backend."""
    return paged_attention(
        query,
        PagedCache(key_cache, value_cache, plan.block_size),
        plan.paged,
        window=window,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
    )


def draw_rows(scores: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Answer as `sampling.DrawRows` asks: draw on the device; the rows' parameters are one copy to it."""
    columns: tuple[NDArray[np.generic], ...] = (
        np.array([row.sampling.temperature for row in rows], np.float64),
        np.array([row.sampling.seed for row in rows], np.uint64),
        np.array([row.position for row in rows], np.int32),
        np.array([row.sequence for row in rows], np.int32),
    )
    # Each begins at a multiple of 16 bytes, whatever the number of rows: Triton compiles anew for other alignments.
    starts = [0, *np.cumsum([-(-column.nbytes // ALIGNMENT) * ALIGNMENT for column in columns])]
    packed = np.zeros(starts[-1], np.uint8)
    for start, column in zip(starts, columns, strict=False):
        packed[start : start + column.nbytes] = column.view(np.uint8)
    there = torch.from_numpy(packed).to(scores.device)
    temperatures, seeds, positions, sequences = (
        there[start : start + column.nbytes].view(dtype)
        for start, column, dtype in zip(starts, columns, COLUMN_TYPES, strict=False)
    )
    return gumbel_max.draw(scores, temperatures, seeds, positions, sequences)


BACKEND = Backend(
    name="triton",
    devices=frozenset({"cuda"}),
    write_kv=kv_write.write_kv,
    attend=attend,
    plan=TritonPlan,
    pack=wire_pack.pack_layers,
    unpack=wire_pack.unpack_layers,
    fuse=fuse_modules,
    static_plan=StaticTritonPlan,
    draw_rows=draw_rows,
)
