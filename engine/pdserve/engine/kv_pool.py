"""The tensors of a paged KV pool: per layer one for keys and one for values, allocated once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.layout import KvLayout
from pdserve.kernels.backends import BACKENDS, Backend
from pdserve.kernels.slots import slots_of

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvPool:
    """KV of `num_blocks` blocks of `block_size` positions, in `layout.dtype`, on `device`.

    Slots are those of `kernels.slots`. Written for any device, but only ever run on the CPU: nothing is claimed for GPUs.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        backend: Backend | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        self._backend = backend or BACKENDS["torch-sdpa"]
        dtype = TORCH_DTYPES[layout.dtype]
        slots = num_blocks * block_size
        # Zeroed, not empty: the memory is then committed now, not in the middle of a request.
        self._caches = [
            (
                torch.zeros(slots, shape.num_kv_heads, shape.key_dim, dtype=dtype, device=device),
                torch.zeros(slots, shape.num_kv_heads, shape.value_dim, dtype=dtype, device=device),
            )
            for shape in layout.layers
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.num_blocks * self.block_size * self.layout.token_bytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys `[slots, kv_heads, key_dim]` and values `[slots, kv_heads, value_dim]` of a layer."""
        return self._caches[layer]

    def slots(self, block_ids: Sequence[int], positions: range) -> Tensor:
        """Return the slots of `positions` (step 1) of a sequence with that block table; int64, on the caches' device."""
        return slots_of(block_ids, positions, self.block_size).to(self._device)

    def pack(self, layers: range, slots: Tensor, into: memoryview) -> None:
        """Write the wire form of `slots` in `layers` into `into`; ValueError if its size is wrong."""
        self._backend.pack([self._caches[layer] for layer in layers], slots, into)

    def unpack(self, layers: range, slots: Tensor, payload: memoryview) -> None:
        """Write the wire form in `payload` into `slots` of `layers`; ValueError if its size is wrong."""
        self._backend.unpack([self._caches[layer] for layer in layers], slots, payload)

    def copy_block(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first `num_positions` positions of block `source` to block `target`, in every layer.

        Raises ValueError for blocks outside the pool, one block named twice, or a number that is not 1 to `block_size`.
        """
        if not (0 <= source < self.num_blocks and 0 <= target < self.num_blocks) or source == target:
            raise ValueError(f"cannot copy block {source} to block {target} of {self.num_blocks}")
        if not 0 < num_positions <= self.block_size:
            raise ValueError(f"cannot copy {num_positions} positions of a block of {self.block_size}")
        first, second = source * self.block_size, target * self.block_size
        for pair in self._caches:
            for cache in pair:
                cache[second : second + num_positions] = cache[first : first + num_positions]

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that whoever reads freed blocks is found out. For tests, as `BlockPool(on_free=…)`."""
        slots = self.slots(block_ids, range(len(block_ids) * self.block_size))
        for pair in self._caches:
            for cache in pair:
                cache[slots] = float("nan")
