"""Which nodes serve an attempt. Pure: loads and a question go in, a pair of nodes or a reason comes out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.build import Role
from pdserve.core.errors import InvalidRequest, NoNodes, PdserveError
from pdserve.core.ids import Incarnation
from pdserve.router.instructions import PlacementQuery
from pdserve.router.nodes import NodeLoad
from pdserve.router.pool_size import PoolSize
from pdserve.router.validation import LengthLimits

MAX_WAITING_PER_NODE = 64
"""Requests that may wait on one node; more wait here, where they keep their order of age."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The nodes of one attempt, of equal identity. `decode` is None when nothing is handed over."""

    prefill: Incarnation
    decode: Incarnation | None
    identity: str


@dataclass(frozen=True, slots=True)
class Busy:
    """Nodes could serve it, but all are busy: wait."""


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """No present node can serve it. `is_final`: another node's coming would not help."""

    error: PdserveError
    is_final: bool


class PlacementPolicy(Protocol):
    """Chooses among pairs that can serve; pluggable."""

    def choose(self, query: PlacementQuery, pairs: Sequence[tuple[NodeLoad, NodeLoad | None]]) -> int | None:
        """Return the index of the best pair, or None to wait; `pairs` may be empty."""
        ...


class LeastLoaded:
    """The prefill node with the fewest waiting prompt tokens, the decode node with room and the fewest sequences.

    Pairs without a KV link are taken only while no pair has one; a node that probably holds the sequence's KV comes first, and
    nodes with which the session failed before come last: one that fails at once is idle, and would be chosen again and again.
    """

    def __init__(self, max_waiting: int = MAX_WAITING_PER_NODE) -> None:
        self._max_waiting = max_waiting

    def choose(self, query: PlacementQuery, pairs: Sequence[tuple[NodeLoad, NodeLoad | None]]) -> int | None:
        """Return the index of the best pair that is not saturated, or None."""
        has_link = any(not _is_apart(prefill, decode) for prefill, decode in pairs)
        open_pairs = [
            (self._cost(query, prefill, decode), index)
            for index, (prefill, decode) in enumerate(pairs)
            if not (has_link and _is_apart(prefill, decode))
            and prefill.num_waiting < self._max_waiting
            and (decode is None or decode.num_waiting < self._max_waiting)
        ]
        return min(open_pairs)[1] if open_pairs else None

    def _cost(self, query: PlacementQuery, prefill: NodeLoad, decode: NodeLoad | None) -> tuple[float, ...]:
        if decode is None:
            avoided = prefill.incarnation in query.avoid
            return (0, avoided, 0, prefill.num_waiting_tokens, prefill.num_waiting + prefill.num_running, 0, 0)
        needed = PoolSize(0, decode.block_size).needs(query.num_tokens, query.num_tokens + 1, query.num_sequences)
        lacks_room = needed > decode.num_free_blocks
        return (
            query.prefer != decode.incarnation if query.prefer is not None else 0,
            (prefill.incarnation in query.avoid) + (decode.incarnation in query.avoid),
            lacks_room,
            prefill.num_waiting_tokens,
            prefill.num_waiting + prefill.num_running,
            decode.num_waiting + decode.num_running,
            -decode.num_free_blocks * decode.block_size,
        )


def _is_apart(prefill: NodeLoad, decode: NodeLoad | None) -> bool:
    """Whether a transfer between the two would first have to wait for a handshake."""
    if decode is None:
        return False
    return decode.incarnation not in prefill.connected_peers and prefill.incarnation not in decode.connected_peers


def place(query: PlacementQuery, nodes: Sequence[NodeLoad], policy: PlacementPolicy) -> Pair | Busy | Unplaceable:
    """Return nodes for the attempt, or why there are none."""
    pairs = _pairs(query, nodes)
    if not pairs:
        return _why_not(query, nodes)
    sure = [pair for pair in pairs if not any(node is not None and node.is_doubtful for node in pair)]
    chosen = policy.choose(query, sure)
    if chosen is None:
        return Busy()
    prefill, decode = sure[chosen]
    return Pair(prefill.incarnation, decode.incarnation if decode else None, prefill.identity)


def can_pair(prefill: NodeLoad, decode: NodeLoad) -> bool:
    """Whether KV of one means the same on the other, and both can agree on how it travels."""
    return prefill.identity == decode.identity and not prefill.capabilities.disagreements(decode.capabilities)


def length_limits(nodes: Sequence[NodeLoad]) -> LengthLimits | None:
    """Return what the present nodes can hold, or None if no two can be paired."""
    groups: dict[str, list[tuple[NodeLoad, NodeLoad]]] = {}
    for prefill in nodes:
        for decode in nodes:
            if prefill.role is Role.PREFILL and decode.role is Role.DECODE and can_pair(prefill, decode):
                groups.setdefault(prefill.identity, []).append((prefill, decode))
    if not groups:
        return None
    common = max(min(min(a.max_model_len, b.max_model_len) for a, b in pairs) for pairs in groups.values())
    longest = max(max(min(a.max_model_len, b.max_model_len) for a, b in pairs) for pairs in groups.values())
    decodes = {decode.incarnation: decode for pairs in groups.values() for _, decode in pairs}
    return LengthLimits(common, longest, tuple(decode.pool for decode in decodes.values()))


def _pairs(query: PlacementQuery, nodes: Sequence[NodeLoad]) -> list[tuple[NodeLoad, NodeLoad | None]]:
    able = [
        node
        for node in nodes
        if node.incarnation not in query.exclude
        and query.identity in (None, node.identity)
        and node.max_model_len >= query.max_len
    ]
    prefills = [node for node in able if node.role is Role.PREFILL]
    if not query.needs_decode:
        return [(prefill, None) for prefill in prefills]
    decodes = [node for node in able if node.role is Role.DECODE and _holds(node, query)]
    return [(prefill, decode) for prefill in prefills for decode in decodes if can_pair(prefill, decode)]


def _holds(decode: NodeLoad, query: PlacementQuery) -> bool:
    """Whether all sequences can grow to their full length; one alone is bound by `max_model_len`."""
    if query.num_sequences == 1:
        return True
    return decode.pool.needs(query.num_tokens, query.max_len, query.num_sequences) <= decode.pool.num_blocks


def _why_not(query: PlacementQuery, nodes: Sequence[NodeLoad]) -> Unplaceable:
    for role in (Role.PREFILL, Role.DECODE):
        if not any(node.role is role for node in nodes) and (role is Role.PREFILL or query.needs_decode):
            return Unplaceable(NoNodes(f"no {role.label} node is ready", retry_after_s=1.0), is_final=False)
    if query.exclude:
        return Unplaceable(NoNodes("every node refused the request"), is_final=True)
    if not query.is_resume and all(node.max_model_len < query.max_len for node in nodes):
        error = InvalidRequest(
            f"prompt and answer may have {query.max_len} tokens; no node holds that many", field="stop.max_tokens"
        )
        return Unplaceable(error, is_final=True)
    mismatch = NoNodes("no prefill and decode node of equal identity are ready", retry_after_s=1.0)
    return Unplaceable(mismatch, is_final=False)
