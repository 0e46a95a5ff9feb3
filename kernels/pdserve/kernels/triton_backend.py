"""The Triton backend: attention, KV write, wire form and draws by our own kernels, and the modules that they replace.

Imported only when it is chosen, since `triton` is an optional extra. Not run on a GPU yet: docs/kernels.md says what is proven.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.backends import Backend
from pdserve.kernels.logits import SampledRow
from pdserve.kernels.one_copy import OneCopy
from pdserve.kernels.ragged import ChunkRows
from pdserve.kernels.slots import slot_of, slots_of
from pdserve.kernels.triton import gumbel_max, kv_write, wire_pack
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.paged_attention import PagedPlan, paged_attention
from pdserve.kernels.triton.paged_decode import DecodeRows
from pdserve.kernels.triton_modules import fuse_modules


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

    Idle rows have length 0 and a negative slot: the kernels see nothing for them and write nothing. A step begins when its
    plan is filled, hence the one copy.
    """

    def __init__(self, num_rows: int, max_length: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.num_rows = num_rows
        self.max_length = max_length
        width = -(-max_length // block_size)
        sizes = (
            (torch.int64, num_rows),
            (torch.int64, num_rows),
            (torch.int32, num_rows),
            (torch.int32, num_rows * width),
        )
        self._inputs = OneCopy(sizes, device)
        self.positions, self.write_slots, lengths, tables = self._inputs.there
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.paged = PagedPlan(num_rows, DecodeRows(rows, lengths, tables.view(num_rows, width), max_length), None)
        self.fill(())

    def fill(self, chunks: Sequence[ChunkRows]) -> None:
        """Describe `chunks`, of one row each, in the same tensors; ValueError if they do not fit."""
        if len(chunks) > self.num_rows or any(c.num_rows != 1 or c.stop > self.max_length for c in chunks):
            raise ValueError(f"not up to {self.num_rows} single rows of up to {self.max_length} positions")
        # Arrays of NumPy: to set an element of a tensor takes ten times as long.
        positions, slots, lengths, flat_tables = (part.numpy() for part in self._inputs.here)
        tables = flat_tables.reshape(self.num_rows, -1)
        for part, idle in ((positions, 0), (slots, -1), (lengths, 0), (tables, 0)):
            part[...] = idle
        for row, chunk in enumerate(chunks):
            positions[row], lengths[row] = chunk.start, chunk.stop
            slots[row] = slot_of(chunk.block_ids, chunk.start, self.block_size)
            used = chunk.block_ids[: -(-chunk.stop // self.block_size)]
            tables[row, : len(used)] = used
        self._inputs.send()


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
    """Answer as `sampling.DrawRows` asks: draw on the device."""
    inputs = OneCopy(
        [(dtype, len(rows)) for dtype in (torch.float64, torch.int64, torch.int32, torch.int32)], scores.device
    )
    temperatures, seeds, positions, sequences = (part.numpy() for part in inputs.here)
    temperatures[:] = [row.sampling.temperature for row in rows]
    seeds[:] = np.array([row.sampling.seed for row in rows], np.uint64).view(np.int64)
    positions[:] = [row.position for row in rows]
    sequences[:] = [row.sequence for row in rows]
    inputs.send()
    return gumbel_max.draw(scores, *inputs.there)


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
