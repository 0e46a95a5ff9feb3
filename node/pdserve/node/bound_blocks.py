"""Which blocks a transfer's KV lies in, for the corridor's thread."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pdserve.core.errors import InternalError
from pdserve.core.ids import TransferId
from pdserve.engine.blocks import BlockLease


class BoundBlocks:
    """Leases by transfer.

    `bind` and `unbind` are called on the event loop's thread, before the corridor may touch the blocks and after it closed the
    transfer; `hold` on the corridor's thread, in between.
    """

    def __init__(self) -> None:
        self._leases: dict[TransferId, BlockLease] = {}

    def __len__(self) -> int:
        """Return the number of transfers whose blocks are known."""
        return len(self._leases)

    def bind(self, transfer_id: TransferId, lease: BlockLease) -> None:
        """Name the blocks of a transfer."""
        self._leases[transfer_id] = lease

    def unbind(self, transfer_id: TransferId) -> None:
        """Forget a transfer that is closed, if it ever had blocks."""
        self._leases.pop(transfer_id, None)

    @contextmanager
    def hold(self, transfer_id: TransferId) -> Iterator[Sequence[int]]:
        """Give the block ids of a transfer and keep them leased meanwhile; raise InternalError if it has none."""
        lease = self._leases.get(transfer_id)
        if lease is None:
            raise InternalError(f"transfer {transfer_id.hex()[:8]} has no blocks here")
        with lease.hold() as block_ids:
            yield block_ids
