"""The end of the corridor on the prefill node: KV packed straight from the pool."""

from pdserve.core.ids import TransferId
from pdserve.engine.engine import Engine
from pdserve.node.bound_blocks import BoundBlocks


class Handoff:
    """A `KvSource` over the engine's pool. While it packs it holds the transfer's blocks."""

    def __init__(self, engine: Engine, bound: BoundBlocks) -> None:
        self._engine, self._bound = engine, bound

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        """Write the canonical wire form of a layer and token range into `into`; its size must fit exactly."""
        with self._bound.hold(transfer_id) as block_ids:
            self._engine.pack(layers, block_ids, tokens, into)
