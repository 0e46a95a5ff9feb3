"""The pool's tensors and where they lie."""

import pytest
import torch

from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.engine.kv_pool import KvPool

LAYOUT = KvLayout((LayerLayout(2, 4, 4, None),), "float32")


def test_slots_lie_where_the_caches_lie() -> None:
    """Indices on the CPU into caches elsewhere are refused by torch. Meta tensors are the other device that is always there."""
    for device in ("cpu", "meta"):
        pool = KvPool(LAYOUT, num_blocks=3, block_size=4, device=torch.device(device))
        assert pool.slots([2, 0], range(1, 6)).device == pool.layer(0)[0].device


def test_a_copy_takes_the_first_positions_of_every_layer_and_touches_nothing_else() -> None:
    layout = KvLayout((LayerLayout(2, 4, 3, None), LayerLayout(1, 2, 2, 6)), "float32")
    pool = KvPool(layout, num_blocks=3, block_size=4, device=torch.device("cpu"))
    caches = [cache for layer in range(2) for cache in pool.layer(layer)]
    for cache in caches:
        cache.copy_(torch.randn_like(cache))
    expected = [cache.clone() for cache in caches]
    pool.copy_block(2, 0, 3)
    for cache, before in zip(caches, expected, strict=True):
        before[0:3] = before[8:11]
        assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("source", "target", "num_positions"), [(0, 0, 1), (3, 0, 1), (0, -1, 1), (0, 1, 0), (0, 1, 5)]
)
def test_a_copy_that_makes_no_sense_is_refused(source: int, target: int, num_positions: int) -> None:
    pool = KvPool(LAYOUT, num_blocks=3, block_size=4, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="cannot copy"):
        pool.copy_block(source, target, num_positions)
