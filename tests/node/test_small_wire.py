"""KV in 8 bits between two pools: as near as the formula says, and plain payloads untouched."""

import torch

from pdserve.core.ids import TransferId, new_transfer_id
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.engine.kv_pool import KvPool
from pdserve.node.small_wire import small_sink, small_source
from tests.kvtransfer.nodes import settings

LAYOUT = KvLayout((LayerLayout(2, 8, 16), LayerLayout(1, 16, 8)), "float32")


class PoolEnd:
    """A pool as both ends of the corridor."""

    def __init__(self, block_ids: list[int]) -> None:
        self.pool = KvPool(LAYOUT, 8, 4, torch.device("cpu"))
        self.block_ids = block_ids

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        self.pool.pack(layers, self.pool.slots(self.block_ids, tokens), into)

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        self.pool.unpack(layers, self.pool.slots(self.block_ids, tokens), payload)

    def content(self, layer: int, num_tokens: int) -> torch.Tensor:
        slots = self.pool.slots(self.block_ids, range(num_tokens))
        return torch.cat([cache[slots].flatten(1) for cache in self.pool.layer(layer)], dim=1)


def moved(wire_dtype: str, sent_as: str) -> tuple[PoolEnd, PoolEnd]:
    """Two pools, after 9 tokens went from one to the other in frames of odd sizes."""
    mine, theirs = PoolEnd([3, 1, 6]), PoolEnd([0, 7, 2])
    for layer in range(2):
        for cache in mine.pool.layer(layer):
            cache.copy_(torch.randn(cache.shape))
    source = small_source(mine, settings(LAYOUT, wire_dtype=sent_as))
    sink = small_sink(theirs, settings(LAYOUT, wire_dtype=wire_dtype))
    for layers, tokens in ((range(2), range(4)), (range(1), range(4, 9)), (range(1, 2), range(4, 9))):
        wire = LAYOUT.on_wire(sent_as) if sent_as else LAYOUT
        payload = bytearray(wire.range_bytes(layers, len(tokens)))
        source.pack(new_transfer_id(), layers, tokens, memoryview(payload))
        sink.place(new_transfer_id(), layers, tokens, memoryview(bytes(payload)))
    return mine, theirs


def test_what_arrives_is_near_and_not_equal() -> None:
    for wire_dtype, bound in (("int8", 0.02), ("float8_e4m3", 0.2)):
        mine, theirs = moved(wire_dtype, wire_dtype)
        for layer in range(2):
            error = (mine.content(layer, 9) - theirs.content(layer, 9)).abs().max()
            assert 0 < float(error) < bound


def test_plain_payloads_stay_exact() -> None:
    mine, theirs = moved("int8", "")
    for layer in range(2):
        assert torch.equal(mine.content(layer, 9), theirs.content(layer, 9))


def test_without_a_wire_dtype_nothing_stands_in_between() -> None:
    end = PoolEnd([0])
    assert small_source(end, settings(LAYOUT)) is end
    assert small_sink(end, settings(LAYOUT)) is end
