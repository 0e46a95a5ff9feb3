"""The corridor: KV travels from a prefill node's pool to a decode node's, while the prompt is still being computed.

In the walk of a request it stands between `prefill_node.handoff` and `decode_node.intake`. It moves bytes and answers for
them; it knows neither tensors nor models, decides nothing about blocks, and talks to no router.

A node uses one class, and hears events on that class's I/O thread. After `CorridorBroken` the process is of no more use.

- A prefill node: `KvSendService` with a `KvSource` (`pack`). `set_peers`; then per transfer `open`, `mark_ready` for each
  computed layer range, and `commit` or `abort`. `SendClosed` is the last event of a transfer.
- A decode node: `KvReceiveService` with a `KvSink` (`place`). `set_peers`; then per transfer `expect`, and on `Opened` a `grant`
  or `refuse`, and `cancel` at any time. `Received` means that all KV is verified and placed; `ReceiveClosed` is the last event.

Inside, from the wire up: `wire`, `messages`, `codec` (frames); `settings` (the bound of every wait, queue and buffer);
`admission`, `doorkeeper`, `strangers` (who may come in); `lent_payloads`, `channel`, `inprocess`, `zeromq`, `curve` (transports);
`shared_memory`, `shared_channel` (payloads inside one host); `nixl_engine`, `nixl_reads`, `nixl_channel` (payloads by RDMA);
`lent_slots` (what both of these send from); `holding`, `shaping`, `faults` (decorators of any transport, for experiments);
`framing`, `coverage`, `handshake`, `memory`, `timers`; `staging`, `receive_window` (who may use how much of what all share);
`sender`, `sender_link`, `sender_table` and `receiver`, `receiver_link`, `receiver_table` (machines without sockets or clocks,
each with its transition table, which answer in `instructions`); `fair_lock`, `herald`, `io_loop`, `send_service`,
`receive_service` (the shells).

Places kept for later: `Data.heads` and `Welcome.endpoints` (head ranges), `Channel` (other transports).
"""

from pdserve.kvtransfer.events import (
    Acked,
    CorridorBroken,
    FinishedEarly,
    Granted,
    KvSink,
    KvSource,
    Opened,
    PeerDown,
    PeerRefused,
    PeerUp,
    ReceiveClosed,
    Received,
    ReceiveEvent,
    ReceiveFailed,
    Reopened,
    SendClosed,
    SendEvent,
    SendFailed,
    TransferSpec,
    TransferStats,
)
from pdserve.kvtransfer.receive_service import KvReceiveService
from pdserve.kvtransfer.send_service import KvSendService
from pdserve.kvtransfer.settings import LinkSettings

__all__ = [
    "Acked",
    "CorridorBroken",
    "FinishedEarly",
    "Granted",
    "KvReceiveService",
    "KvSendService",
    "KvSink",
    "KvSource",
    "LinkSettings",
    "Opened",
    "PeerDown",
    "PeerRefused",
    "PeerUp",
    "ReceiveClosed",
    "ReceiveEvent",
    "ReceiveFailed",
    "Received",
    "Reopened",
    "SendClosed",
    "SendEvent",
    "SendFailed",
    "TransferSpec",
    "TransferStats",
]
