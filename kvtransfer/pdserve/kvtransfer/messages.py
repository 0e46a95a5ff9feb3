"""The messages of the corridor, as values. `codec` turns them into frames and back; the design's table in section 6 lists them.

Byte counts of the window are cumulative since WELCOME and count DATA payload only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.layout import KvLayout
from pdserve.core.work import SampledToken

PROTOCOL_VERSION = 2
ALL_HEADS = (0, 0)
"""A KV-head range that means all heads of every layer; the only one so far."""


class NackReason(IntEnum):
    """Why a receiver ends a transfer; the values travel."""

    BUSY = 1
    """No room now; another node or a later try may do. Not a failure."""
    REFUSED = 2
    """The decode node will not take it; `detail` says why."""
    GAP = 3
    """A DATA frame is missing, repeated or out of sequence, or COMMIT counts others than came."""
    CHECKSUM = 4
    """A payload does not match its checksum."""
    FRAME = 5
    """A frame on this connection was damaged; nothing on it can be trusted."""
    LAYOUT = 6
    """Data type, heads or payload length do not fit the model."""
    RANGE = 7
    """Layers or tokens lie outside what was granted."""
    OVERLAP = 8
    """A range was sent twice."""
    INCOMPLETE = 9
    """COMMIT came, but the ranges do not cover what the layout needs."""
    ORDER = 10
    """DATA or COMMIT before GRANT."""
    MISMATCH = 11
    """Attempt, prompt digest or token count differ from what the router submitted."""
    PEER = 12
    """The router named another sender for this transfer."""
    WINDOW = 13
    """More bytes than the window allowed."""
    PLACE = 14
    """The pool could not take the bytes."""
    IDLE = 15
    """Nothing was heard of the transfer for too long."""
    SHUTDOWN = 16
    """The receiver is stopping."""

    @property
    def label(self) -> str:
        """Name as it appears in reasons, e.g. `kv_nack_checksum`."""
        return f"kv_nack_{self.name.lower()}"


class GoneKind(IntEnum):
    """What is known of an id that is not live here; the values travel."""

    UNKNOWN = 1
    OVER = 2


@dataclass(frozen=True)
class Offer:
    """What a sender's KV means and looks like."""

    identity: Identity
    capabilities: Capabilities
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a connection. `offer` is None if and only if the version is not ours.

    `expected` is the receiver that the sender means to reach. `nonce` is 16 random bytes that WELCOME's proof must cover;
    `proof` is empty, or 32 bytes over the receiver's challenge.
    """

    incarnation: Incarnation
    expected: Incarnation
    nonce: bytes
    offer: Offer | None
    proof: bytes = b""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Challenge:
    """The receiver holds a cluster secret: say HELLO again with a proof over these 16 fresh random bytes."""

    challenge: bytes


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Where KV heads [start, stop) are taken; (0, 0) means all. An empty address means this connection."""

    start: int
    stop: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection is usable; `window_limit` bytes of payload may be sent on it for now."""

    incarnation: Incarnation
    endpoints: tuple[HeadRange, ...]
    reserve_policy: str
    window_limit: int
    proof: bytes = b""


@dataclass(frozen=True, slots=True)
class Refuse:
    """The connection is not usable: which fields differ. `can_retry` says whether a new connection may fare better."""

    fields: tuple[str, ...]
    detail: str = ""
    can_retry: bool = False


@dataclass(frozen=True, slots=True)
class Open:
    """Announces a transfer of `num_tokens` positions; `rank` is the sending tensor-parallel rank."""

    transfer_id: TransferId
    attempt: int
    prompt_digest: bytes
    num_tokens: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks are promised; the first `skip_tokens` positions need not travel."""

    transfer_id: TransferId
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Data:
    """Header of a payload frame that follows it: for each layer K `[token, head, key_dim]`, then V."""

    transfer_id: TransferId
    attempt: int
    sequence: int
    layers: range
    tokens: range
    dtype: str
    num_bytes: int
    checksum: int
    heads: tuple[int, int] = ALL_HEADS


@dataclass(frozen=True, slots=True)
class Commit:
    """All DATA is sent. One first token per sequence; durations are seconds by name on the sender's clock."""

    transfer_id: TransferId
    attempt: int
    num_frames: int
    tokens: tuple[SampledToken, ...]
    durations_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ack:
    """All bytes are verified and placed."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Nack:
    """The transfer is over on the receiver, and why."""

    transfer_id: TransferId
    reason: NackReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender of this message gives up.

    `finished`: nothing is wrong, the request ended at its first token. `busy`: nothing is wrong, there is no room for it now and
    another node or a later try may do. Never both.
    """

    transfer_id: TransferId
    finished: bool = False
    reason: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """That id is not live here."""

    transfer_id: TransferId
    kind: GoneKind


@dataclass(frozen=True, slots=True)
class Beat:
    """Sign of life. From a receiver: the window, and the OPENs it has parked. From a sender: the transfers it works on."""

    window_limit: int = 0
    transfer_ids: tuple[TransferId, ...] = ()


Message = Hello | Challenge | Welcome | Refuse | Open | Grant | Data | Commit | Ack | Nack | Abort | Gone | Beat
