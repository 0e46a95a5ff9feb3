"""The pool's tensors and where they lie."""

import torch

from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.engine.kv_pool import KvPool

LAYOUT = KvLayout((LayerLayout(2, 4, 4, None),), "float32")


def test_slots_lie_where_the_caches_lie() -> None:
    """Indices on the CPU into caches elsewhere are refused by torch. Meta tensors are the other device that is always there."""
    for device in ("cpu", "meta"):
        pool = KvPool(LAYOUT, num_blocks=3, block_size=4, device=torch.device(device))
        assert pool.slots([2, 0], range(1, 6)).device == pool.layer(0)[0].device
