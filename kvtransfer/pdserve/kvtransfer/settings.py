"""What a node tells the corridor about itself, and the bounds of every wait, queue and buffer in it."""

from dataclasses import dataclass
from functools import cached_property

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import ConfigError
from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation
from pdserve.core.layout import SMALL_DTYPES, KvLayout
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.messages import Offer

MAX_FRAMES_IN_SOCKET = 4
"""DATA frames per peer that are inside its socket at once: control never waits behind more."""

MAX_REOPENS = 3
"""Connections that one transfer may lose before it fails: a link that breaks a fourth time within one prompt carries nothing."""


@dataclass(frozen=True)
class LinkSettings:
    """Settings of a node's end of the corridor. Times in seconds, sizes in bytes.

    `secret` is the cluster secret; with it, only peers that prove to know it get a WELCOME. Deadlines are named for what is
    waited for; where both sides wait for the same thing the owner's deadline stands here and the other adds `lease_s` twice.
    """

    identity: Identity
    capabilities: Capabilities
    layout: KvLayout
    incarnation: Incarnation
    secret: ClusterSecret | None = None
    reserve_policy: str = "on_open"
    wire_dtype: str = ""
    """An 8-bit form of KV. A sender sends nothing else; a receiver takes it beside its own dtype. Empty: only its own."""

    lease_s: float = 3.0
    """A link is lost when nothing was heard for this long."""
    beat_s: float = 0.5
    connect_wait_s: float = 5.0
    """Sender, owner: an opened transfer waits this long for a usable link, also after it lost one."""
    open_wait_s: float = 600.0
    """Receiver: an expected transfer waits this long for OPEN; prompts may queue on the prefill node all that time."""
    grant_wait_s: float = 30.0
    """Receiver, owner: an OPEN waits this long for the node's grant, then NACK(BUSY)."""
    transfer_idle_s: float = 10.0
    """Receiver: time without a frame or a beat that names the transfer. Sender: time in which data is ready
    and the link takes no frame of any transfer, and from COMMIT to its answer."""
    produce_wait_s: float = 300.0
    """Sender: time without a range becoming ready. A backstop; the node's own deadlines are shorter. Receiver: two leases more
    without a frame end a transfer, however often beats name it."""
    park_s: float = 2.0
    """An OPEN that overtook its submit, or a HELLO that overtook the router's list of peers, waits this long."""
    retry_min_s: float = 0.1
    retry_max_s: float = 1.0
    """A lost link is dialled again after a pause that doubles from the first to the second."""
    tombstone_s: float = 60.0

    window_bytes: int = 64 << 20
    """Payload bytes that a sender may have under way on one link."""
    receive_bytes: int = 256 << 20
    """Receiver: payload bytes that may be under way on all links together, beyond two frames of each."""
    staging_bytes: int = 16 << 20
    """Sender: packed payload that no socket has taken yet, all links together."""
    max_parked: int = 256
    """Parked OPENs; further ones are answered GONE(unknown). Also handshakes under way; of those the oldest makes room."""
    max_tombstones: int = 4096
    max_waiting_marks: int = 65536
    """Ready marks on their way from the engine's thread; beyond it, the transfer that is marked fails by name."""

    def __post_init__(self) -> None:
        """Raise ConfigError with every fault."""
        layout = self.layout
        faults = [
            f"{name} must be at least one frame of {MAX_FRAME_BYTES} bytes"
            for name in ("window_bytes", "receive_bytes", "staging_bytes")
            if getattr(self, name) < MAX_FRAME_BYTES
        ]
        if self.wire_dtype and self.wire_dtype not in SMALL_DTYPES:
            faults.append(f"kv_wire: {self.wire_dtype!r} is none of {', '.join(SMALL_DTYPES)}")
        elif self.wire_dtype and any(
            self.wire_layout.layer_token_bytes(layer) >= layout.layer_token_bytes(layer)
            for layer in range(layout.num_layers)
        ):
            faults.append(f"kv_wire: {self.wire_dtype} with its scales is no smaller than this model's {layout.dtype}")
        if any(layout.layer_token_bytes(layer) > MAX_FRAME_BYTES for layer in range(layout.num_layers)):
            faults.append(f"one token of a layer does not fit a frame of {MAX_FRAME_BYTES} bytes")
        if self.beat_s * 3 > self.lease_s:
            faults.append(f"lease_s ({self.lease_s}) must be at least three times beat_s ({self.beat_s})")
        if faults:
            raise ConfigError(faults)

    @property
    def base_window_bytes(self) -> int:
        """What may be under way on any link at any time: with two frames, one may come while the other is waited for."""
        return min(self.window_bytes, 2 * MAX_FRAME_BYTES)

    @cached_property
    def wire_layout(self) -> KvLayout:
        """Shape and dtype of what a sender sends."""
        return self.layout.on_wire(self.wire_dtype) if self.wire_dtype else self.layout

    def taken_layout(self, dtype: str) -> KvLayout | None:
        """Return shape and dtype of a payload in `dtype`; None if a receiver does not take it."""
        return next((each for each in (self.layout, self.wire_layout) if each.dtype == dtype), None)

    @property
    def offer(self) -> Offer:
        """What HELLO carries, and is compared with."""
        return Offer(self.identity, self.capabilities, self.layout)
