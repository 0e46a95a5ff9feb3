"""What the corridor tells a node, and what it asks of the node's pool.

Events reach `on_event` on the I/O thread, in order per transfer. `SendClosed` and `ReceiveClosed` are always the last event of a
transfer: after them the pool is never touched for it again, so that is when its blocks may go.
"""

from dataclasses import dataclass, field
from typing import Protocol

from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.work import SampledToken

SHUTDOWN = "shutdown"
CORRIDOR_BROKEN = "corridor_broken"
"""Why a transfer failed when its own node's end of the corridor ended: by `stop`, or by a fault."""


class KvSource(Protocol):
    """A prefill node's pool, read on the I/O thread."""

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        """Write the wire form of a range that was marked ready.

        For each layer K `[token, kv_head, key_dim]`, then V `[token, kv_head, value_dim]`, contiguous, little-endian, in the
        layout's dtype. `into` is writable and has exactly `layout.range_bytes(layers, len(tokens))` bytes. Whatever is raised
        fails this transfer only.
        """
        ...


class KvSink(Protocol):
    """A decode node's pool, written on the I/O thread, only between a grant and `ReceiveClosed`."""

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        """Read the wire form of a range into the pool; `payload` is valid during the call only.

        Whatever is raised fails this transfer only.
        """
        ...


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """One transfer as a router's submit describes it.

    `peer` is the other node; `prompt_digest` is 32 bytes (`core.work.prompt_digest` over the context ids); `num_tokens` is the
    number of context tokens; `arrived_s` orders transfers by original age, on this process's clock.
    """

    transfer_id: TransferId
    attempt: int
    peer: Incarnation
    prompt_digest: bytes
    num_tokens: int
    arrived_s: float


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What a transfer took; seconds on this node's clock, 0 where the other side did the work.

    `exposed_s` runs from the node's `commit` to ACK; `grant_wait_s` from OPEN to GRANT, or to the end if none came; `stalled_s`
    is time in which data was ready but window, socket or staging was not, or other transfers on the link went first.
    """

    kv_bytes: int = 0
    num_frames: int = 0
    pack_s: float = 0.0
    place_s: float = 0.0
    grant_wait_s: float = 0.0
    exposed_s: float = 0.0
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The handshake with this peer is complete."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The link to this peer, which was up, is lost; its transfers wait a short while for the next connection."""

    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class CorridorBroken:
    """The I/O thread is over by a fault; all transfers were ended before. Nothing goes through this process any more.

    A transfer that is opened or expected from now on fails at once, on the thread that asks for it.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """This pair can never work: the named fields differ."""

    incarnation: Incarnation
    fields: tuple[str, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode node promised blocks; it holds the first `skip_tokens` already."""

    transfer_id: TransferId
    skip_tokens: int


@dataclass(frozen=True, slots=True)
class Acked:
    """Everything arrived, verified and placed."""

    transfer_id: TransferId
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The transfer ended without ACK, not by the node's own `abort`. `busy`: the other node has no room for now, no failure."""

    transfer_id: TransferId
    reason: str
    detail: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class SendClosed:
    """Last event of an opened transfer."""

    transfer_id: TransferId
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class Opened:
    """The prefill node is near this prompt: time to reserve, and to answer with `grant` or `refuse`."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Reopened:
    """The transfer goes on over a new connection, from its first frame; `because` is how the last one was lost.

    Nothing is asked of the node: what it granted and committed holds. The service counts it, and logs it.
    """

    transfer_id: TransferId
    because: str


@dataclass(frozen=True, slots=True)
class Received:
    """All KV is verified and placed, and ACK is sent. `tokens` are the first tokens, one per sequence."""

    transfer_id: TransferId
    tokens: tuple[SampledToken, ...]
    durations_s: dict[str, float] = field(default_factory=dict)
    stats: TransferStats = TransferStats()


@dataclass(frozen=True, slots=True)
class FinishedEarly:
    """All sequences ended at their first token; there is nothing to adopt."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The transfer ended without adoption, not by the node's own `refuse` or `cancel`.

    `busy`: one of the two nodes has no room for now, no failure.
    """

    transfer_id: TransferId
    reason: str
    detail: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class ReceiveClosed:
    """Last event of an expected transfer."""

    transfer_id: TransferId


LinkEvent = PeerUp | PeerDown | PeerRefused | CorridorBroken
SendEvent = LinkEvent | Granted | Reopened | Acked | SendFailed | SendClosed
ReceiveEvent = LinkEvent | Opened | Reopened | Received | FinishedEarly | ReceiveFailed | ReceiveClosed
