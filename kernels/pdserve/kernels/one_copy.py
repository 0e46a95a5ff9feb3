"""Several small arrays that reach a device in one copy, since each copy costs the host as much as a kernel's launch does."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Triton loads wide words from pointers that are multiples of it, and compiles anew where others are not."""


class OneCopy:
    """Arrays in one piece of memory of the host, and the same in one of a device. `send` makes the second like the first.

    `wanted`: type and length of each. One owner; `send` returns when the host's may be written again.
    """

    def __init__(self, wanted: Sequence[tuple[torch.dtype, int]], device: torch.device) -> None:
        size = sum(_aligned(count * dtype.itemsize) for dtype, count in wanted)
        self._host = torch.zeros(size, dtype=torch.uint8)
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self.here = _parts(self._host, wanted)
        """Tensors on the host, to be written."""
        self.there = _parts(self._there, wanted)
        """Tensors on the device, to be read. They stay where they are."""

    def send(self) -> None:
        """Copy all of them; the host does not ask to wait until the device is done with what came before."""
        # The host's memory is not pinned, so that CUDA has read it when the call returns, waited for or not.
        self._there.copy_(self._host, non_blocking=True)


def _parts(memory: Tensor, wanted: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    parts, start = [], 0
    for dtype, count in wanted:
        stop = start + count * dtype.itemsize
        parts.append(memory[start:stop].view(dtype))
        start = _aligned(stop)
    return parts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
