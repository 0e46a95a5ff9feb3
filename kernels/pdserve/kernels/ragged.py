"""The plan of one ragged step: which rows belong to which sequence, and the indices and masks that all layers share.

A step concatenates chunks of several sequences: rows `[chunk 0 | chunk 1 | …]`. Chunk c covers the absolute positions
`start … start + num_rows - 1` of its sequence, whose earlier positions already lie in the cache. Row r at position p sees
the cached positions

    max(0, p - window + 1) … p          (window = infinity for full attention)

Chunks of one row (decode) are attended together in padded groups; longer chunks one by one. Indices are made once per step
and window, not once per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.slots import slots_of

GROUP_FILL = 0.5
"""A decode group takes rows whose visible length is at least this share of its longest row's."""
GROUP_SLOTS = 2048
"""Most positions that a decode group gathers, if it has several rows: what was gathered then is still in the cache of the
processor when attention reads it (two to three times faster than one large group, measured at 512 positions a row)."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One chunk of a step: `num_rows` new tokens of a sequence from absolute position `start`, and its block table."""

    start: int
    num_rows: int
    block_ids: Sequence[int]

    @property
    def stop(self) -> int:
        """Position after the last new token; also the number of positions that lie in the cache after the write."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single-row chunks attended together.

    `rows` [batch]; `gather` [batch * length] slots, padded with a slot of the same sequence (never of another: freed blocks
    may hold anything); `mask` [batch, 1, 1, length] additive, or None if nothing is padded.
    """

    rows: Tensor
    gather: Tensor
    batch: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """One chunk of several rows: `gather` [length] slots of all positions any row sees; `mask` [rows, length] additive."""

    first_row: int
    num_rows: int
    gather: Tensor
    mask: Tensor


class RaggedPlan:
    """Everything about a step's rows that does not depend on the layer; groups per window are made at first use."""

    def __init__(self, chunks: Sequence[ChunkRows], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._groups: dict[int | None, tuple[list[DecodeGroup], list[PrefillGroup]]] = {}
        self.num_rows = sum(chunk.num_rows for chunk in chunks)
        slots_by_chunk = [slots_of(chunk.block_ids, range(chunk.stop), block_size) for chunk in chunks]
        self.write_slots = torch.cat(
            [slots[chunk.start :] for chunk, slots in zip(chunks, slots_by_chunk, strict=True)]
        ).to(device)
        """Slot of every new token, [rows], int64."""
        self.positions = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).to(device)
        """Absolute position of every new token, [rows], int64."""
        self._chunks: list[tuple[int, ChunkRows, Tensor]] = []
        row = 0
        for chunk, slots in zip(chunks, slots_by_chunk, strict=True):
            self._chunks.append((row, chunk, slots))
            row += chunk.num_rows

    def groups(self, window: int | None) -> tuple[list[DecodeGroup], list[PrefillGroup]]:
        """Return the decode groups and prefill chunks for layers with this sliding window (tokens), None for full."""
        made = self._groups.get(window)
        if made is None:
            decode = [item for item in self._chunks if item[1].num_rows == 1]
            prefill = [item for item in self._chunks if item[1].num_rows > 1]
            made = (
                self._decode_groups(decode, window),
                [self._prefill_group(row, chunk, slots, window) for row, chunk, slots in prefill],
            )
            self._groups[window] = made
        return made

    def _decode_groups(self, items: list[tuple[int, ChunkRows, Tensor]], window: int | None) -> list[DecodeGroup]:
        seen = sorted(
            ((row, slots[_first_visible(chunk.start, window) :]) for row, chunk, slots in items),
            key=lambda pair: -pair[1].shape[0],
        )
        groups: list[list[tuple[int, Tensor]]] = []
        for row, slots in seen:
            longest = groups[-1][0][1].shape[0] if groups else 0
            is_full = (len(groups[-1]) + 1) * longest > GROUP_SLOTS if groups else True
            if is_full or slots.shape[0] < GROUP_FILL * longest:
                groups.append([])
            groups[-1].append((row, slots))
        return [self._decode_group(group) for group in groups]

    def _decode_group(self, group: list[tuple[int, Tensor]]) -> DecodeGroup:
        lengths = [slots.shape[0] for _, slots in group]
        longest = lengths[0]
        gather = torch.stack(
            [
                slots if slots.shape[0] == longest else torch.cat([slots, slots[-1:].expand(longest - slots.shape[0])])
                for _, slots in group
            ]
        )
        mask = None
        if lengths[-1] != longest:
            padded = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
            mask = torch.zeros(padded.shape, dtype=self._dtype).masked_fill(padded, float("-inf"))
            mask = mask[:, None, None].to(self._device)
        rows = torch.tensor([row for row, _ in group], device=self._device)
        return DecodeGroup(rows, gather.flatten().to(self._device), len(group), longest, mask)

    def _prefill_group(self, row: int, chunk: ChunkRows, slots: Tensor, window: int | None) -> PrefillGroup:
        first = _first_visible(chunk.start, window)
        query = torch.arange(chunk.start, chunk.stop)[:, None]
        key = torch.arange(first, chunk.stop)[None]
        hidden = key > query
        if window is not None:
            hidden |= query - key >= window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill(hidden, float("-inf"))
        return PrefillGroup(row, chunk.num_rows, slots[first:].to(self._device), mask.to(self._device))


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)
