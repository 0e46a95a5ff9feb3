"""What the model of the exhaustive search is made of: tiny settings, plans and runs, and what its copies share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.lifecycle import LifeCycle
from pdserve.core.work import SampledToken
from pdserve.kvtransfer.events import TransferSpec
from pdserve.kvtransfer.receiver import RECEIVE_TABLE
from pdserve.kvtransfer.receiver_link import RECEIVER_LINK_TABLE
from pdserve.kvtransfer.sender import SEND_TABLE
from pdserve.kvtransfer.sender_link import SENDER_LINK_TABLE
from pdserve.kvtransfer.settings import LinkSettings
from pdserve.kvtransfer.staging import StagingPool
from tests.kvtransfer.nodes import CAPABILITIES, IDENTITY

LAYOUT = KvLayout((LayerLayout(1, 1, 1),), "float16")
NUM_TOKENS = 2
FRAME_BYTES = LAYOUT.token_bytes
FIRST = (SampledToken(0, 42, -0.25),)
TABLES: dict[str, Any] = {
    table.name: table for table in (SEND_TABLE, RECEIVE_TABLE, SENDER_LINK_TABLE, RECEIVER_LINK_TABLE)
}
STATES = {name: {state.value: state for state in type(table.initial)} for name, table in TABLES.items()}
STAGING = StagingPool(1, FRAME_BYTES)
"""One buffer, always free: the model's sockets let go at once."""
SENDER, RECEIVER = "sender", "receiver"
Action = tuple[object, ...]


class Broken(AssertionError):
    """The protocol did what it must never do."""


@dataclass(frozen=True)
class ModelSettings(LinkSettings):
    """Settings with a window and bounds far smaller than real frames, which real settings refuse."""

    side: str = SENDER
    generation: int = 0

    def __post_init__(self) -> None:
        """Skip the bounds of real frames."""

    @property
    def base_window_bytes(self) -> int:
        """One frame if the window is two, so that the second one is leased; else the window, which then is no matter."""
        return FRAME_BYTES if self.window_bytes == 2 * FRAME_BYTES else self.window_bytes


@cache
def settings_of(side: str, generation: int, window_bytes: int, has_secret: bool, wire_dtype: str) -> ModelSettings:
    """Return the settings of one run of one side, always the same object."""
    return ModelSettings(
        identity=IDENTITY,
        capabilities=replace(CAPABILITIES, wire_dtypes=(*CAPABILITIES.wire_dtypes, *filter(None, [wire_dtype]))),
        wire_dtype=wire_dtype,
        layout=LAYOUT,
        incarnation=Incarnation(f"{side[0]}{generation}".encode() * 8),
        secret=ClusterSecret(b"the secret of the model") if has_secret else None,
        lease_s=3.0,
        beat_s=1.0,
        connect_wait_s=4.0,
        open_wait_s=8.0,
        grant_wait_s=4.0,
        transfer_idle_s=4.0,
        produce_wait_s=5.0,
        park_s=2.0,
        retry_min_s=0.5,
        retry_max_s=0.5,
        tombstone_s=1000.0,
        window_bytes=window_bytes,
        side=side,
        generation=generation,
    )


@dataclass(frozen=True)
class Plan:
    """One transfer: its id, and the attempt that each node was told. They differ if one node's submit is stale."""

    name: int
    sent_attempt: int = 1
    expected_attempt: int = 1

    @property
    def transfer_id(self) -> TransferId:
        """Its id on the wire."""
        return TransferId(bytes([self.name]) * 16)


@dataclass(slots=True)
class Run:
    """What one node knows of one transfer."""

    times: int = 0
    """How often a submit started it."""
    produced: int = 0
    """Sender: ranges marked, then COMMIT. Receiver: 1 after OPEN came."""
    is_decided: bool = False
    """Receiver: granted, refused or cancelled."""
    is_aborted: bool = False
    events: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether a last event is owed."""
        return self.events.count("closed") < self.times


def content(name: int, attempt: int, token: int, num_bytes: int = FRAME_BYTES) -> bytes:
    """The KV of one token of one attempt: different everywhere."""
    return bytes([name, attempt, token, 0xA5]).ljust(num_bytes, b"\x5a")


@cache
def spec_of(transfer_id: TransferId, attempt: int, peer: Incarnation) -> TransferSpec:
    """Return the transfer that a submit tells, always the same object."""
    return TransferSpec(transfer_id, attempt, peer, bytes(32), NUM_TOKENS, float(transfer_id[0]))


@cache
def _plan(name: int, sent_attempt: int, expected_attempt: int) -> Plan:
    return Plan(name, sent_attempt, expected_attempt)


def _life(table: str, subject: str, entered_s: float, state: int) -> LifeCycle[Enum, Enum]:
    life = LifeCycle(TABLES[table], subject, entered_s)
    life.state = STATES[table][state]
    return life


@cache
def _layout(dtype: str) -> KvLayout:
    return LAYOUT.on_wire(dtype)


SHARED: dict[type, Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    LifeCycle: lambda life: (_life, (life.table.name, life.subject, life.entered_s, life.state.value)),
    KvLayout: lambda layout: (_layout, (layout.dtype,)),
    ModelSettings: lambda mine: (
        settings_of,
        (mine.side, mine.generation, mine.window_bytes, mine.secret is not None, mine.wire_dtype),
    ),
    TransferSpec: lambda spec: (spec_of, (spec.transfer_id, spec.attempt, spec.peer)),
    Plan: lambda plan: (_plan, (plan.name, plan.sent_attempt, plan.expected_attempt)),
}
"""How a copy shares what never changes, and leaves out stories."""
