"""The end of the corridor on the decode node: KV placed straight into the pool."""

from pdserve.core.ids import TransferId
from pdserve.engine.engine import Engine
from pdserve.node.bound_blocks import BoundBlocks


class Intake:
    """A `KvSink` over the engine's pool. While it places it holds the transfer's blocks."""

    def __init__(self, engine: Engine, bound: BoundBlocks) -> None:
        self._engine, self._bound = engine, bound

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        """Write the canonical wire form of a layer and token range into the pool; its size must fit exactly."""
        with self._bound.hold(transfer_id) as block_ids:
            self._engine.unpack(layers, block_ids, tokens, payload)
