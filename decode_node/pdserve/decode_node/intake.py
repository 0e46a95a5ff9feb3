"""The end of the corridor on the decode node: which blocks a transfer's KV goes to, placed straight into the pool."""

from pdserve.core.errors import InternalError
from pdserve.core.ids import TransferId
from pdserve.engine.blocks import BlockLease
from pdserve.engine.engine import Engine


class Intake:
    """A `KvSink` over the engine's pool.

    `bind` and `unbind` are called on the event loop's thread, before the grant leaves and after the corridor closed the
    transfer; `place` on the corridor's thread, in between. While it places it holds the lease.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._leases: dict[TransferId, BlockLease] = {}

    def bind(self, transfer_id: TransferId, lease: BlockLease) -> None:
        """Name the blocks of a transfer."""
        self._leases[transfer_id] = lease

    def unbind(self, transfer_id: TransferId) -> None:
        """Forget a transfer that is closed."""
        self._leases.pop(transfer_id, None)

    @property
    def num_bound(self) -> int:
        """Transfers whose blocks are known."""
        return len(self._leases)

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        """Write the canonical wire form of a layer and token range into the pool; its size must fit exactly."""
        lease = self._leases.get(transfer_id)
        if lease is None:
            raise InternalError(f"KV of transfer {transfer_id.hex()[:8]} arrived without blocks")
        with lease.hold() as block_ids:
            self._engine.unpack(layers, block_ids, tokens, payload)
