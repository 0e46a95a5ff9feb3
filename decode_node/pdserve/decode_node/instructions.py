"""What the decode scheduler asks for: the desk carries it to engine, corridor and router."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.core.ids import LegKey, TransferId
from pdserve.core.work import SampledToken, Work
from pdserve.decode_node.leg import DecodeLeg
from pdserve.decode_node.sequence import Sequence
from pdserve.engine.blocks import BlockLease
from pdserve.node.reports import LegReport


@dataclass(frozen=True, slots=True)
class ExpectTransfer:
    """Let the corridor accept this transfer: a router's submit created it."""

    work: Work


@dataclass(frozen=True, slots=True)
class GrantTransfer:
    """Promise blocks to a transfer: bind them, tell the prefill node, tell the router."""

    leg: LegKey
    transfer_id: TransferId
    lease: BlockLease
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Give a transfer up, `is_busy` if that is nobody's failure; the corridor answers with its last event."""

    transfer_id: TransferId
    reason: str
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class ReportAdopted:
    """Tell the router that all KV is here, with the first tokens again."""

    leg: LegKey
    tokens: tuple[SampledToken, ...]
    durations_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReportToken:
    """Tell the router a new token."""

    leg: LegKey
    token: SampledToken


Instruction = ExpectTransfer | GrantTransfer | CancelTransfer | ReportAdopted | ReportToken | LegReport


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the KV of the first `num_positions` positions of a block to another, before the step's forward pass."""

    source: int
    target: int
    num_positions: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the sequences that get one token each, the leg of each, and the blocks that must be copied before they write."""

    sequences: tuple[Sequence, ...]
    legs: tuple[DecodeLeg, ...]
    copies: tuple[BlockCopy, ...] = ()
