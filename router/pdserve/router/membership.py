"""Which nodes there are, how they stand, and which may be paired. No sockets: links report here, and are told what to say."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdserve.core.build import Role
from pdserve.core.ids import Incarnation
from pdserve.router import pb_nodes
from pdserve.router.nodes import ROUTER_STOPS, Hello, LegId, NodeLedger, NodeLoad, NodeState, Status
from pdserve.router.pb import NodeRow
from pdserve.router.placement import can_pair
from pdserve.v1 import node_pb2

DOUBT_S = 0.1
"""What is read this soon after another node's word may have been sent before it."""

DIFFERS = "differs in"
"""Begins the names of fields for which two nodes can never be linked."""

LEVELS = {NodeState.REFUSED: logging.ERROR, NodeState.LOADING: logging.INFO}

logger = logging.getLogger(__name__)

Send = Callable[[node_pb2.AttachRequest], bool]
"""Hands a message to a node's stream; False if the stream cannot take it (and will break)."""


@dataclass(slots=True)
class Member:
    """One address of a pool. `hello` and `send` are there exactly while the node is attached."""

    address: str
    role: Role
    state: NodeState = NodeState.CONNECTING
    reason: str = ""
    hello: Hello | None = None
    status: Status = field(default_factory=Status)
    ledger: NodeLedger = field(default_factory=NodeLedger)
    send: Send | None = None
    told_peers: tuple[tuple[Incarnation, bytes], ...] | None = None
    is_broken: bool = False
    """The stream takes nothing any more, although its end is not reported yet."""
    is_stuck: bool = False
    """Its running step is too old. Stays true over a new stream, until a beat says otherwise."""
    doubted_s: float | None = None
    """When another node said that this one is lost; None once it spoke again."""

    @property
    def is_usable(self) -> bool:
        """Whether it may be paired."""
        return self.state is NodeState.READY

    @property
    def is_doubtful(self) -> bool:
        """Whether new work must wait until it is known how the node stands."""
        return self.is_broken or self.doubted_s is not None


class Membership:
    """The two pools. `on_change` is called after every change of who is usable or how loaded they are."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str], tokenizer_digest: str) -> None:
        self._tokenizer_digest = tokenizer_digest
        self.members = [Member(address, Role.PREFILL) for address in prefill]
        self.members += [Member(address, Role.DECODE) for address in decode]
        self._by_incarnation: dict[Incarnation, Member] = {}
        self.on_change: Callable[[], None] = _nothing_changes
        self.on_lost: Callable[[Incarnation, str], None] = _nobody_is_lost

    # ---- what links report

    def refusal(self, member: Member, hello: Hello) -> str | None:
        """Return why the node at this address cannot be used, or None."""
        role = hello.process.role
        if role is not member.role:
            return f"{role.label} address given as {member.role.label}"
        if self._tokenizer_digest != hello.identity.tokenizer_digest:
            return "the node's tokenizer differs from the router's: tokenizer_digest"
        other = self._by_incarnation.get(hello.incarnation)
        if other is not None and other is not member:
            return f"the same node as {other.address}"
        return None

    def attached(self, member: Member, hello: Hello, send: Send) -> None:
        """Take a node in."""
        member.hello, member.send = hello, send
        member.status, member.ledger, member.told_peers = Status(), NodeLedger(), None
        member.is_broken, member.doubted_s = False, None
        self._by_incarnation[hello.incarnation] = member
        self._log(member, logging.INFO, "attached")
        self._changed()

    def status(self, member: Member, status: Status) -> None:
        """Take a node's load."""
        member.status = status
        member.ledger.reported()
        self._changed()

    def heard(self, member: Member, now_s: float) -> None:
        """Take any message as proof that the node lives, unless it may have been under way when the doubt came up."""
        if member.doubted_s is not None and now_s >= member.doubted_s + DOUBT_S:
            member.doubted_s = None
            self._changed()

    def stuck(self, member: Member, is_stuck: bool) -> None:
        """Take what a beat says of the node's running step."""
        member.is_stuck = is_stuck
        self._changed()

    def detached(self, member: Member, state: NodeState, reason: str) -> None:
        """Take the break of a stream, or a failed try. The node's incarnation, if it was attached, is lost."""
        hello, was = member.hello, (member.state, member.reason)
        member.hello, member.send, member.told_peers = None, None, None
        member.state, member.reason = state, reason
        if was != (state, reason):
            level = LEVELS.get(state, logging.WARNING) if reason != ROUTER_STOPS else logging.DEBUG
            self._log(member, level, f"{state}: {reason}")
        if hello is None:
            return
        del self._by_incarnation[hello.incarnation]
        self.on_lost(hello.incarnation, reason)
        self._changed()

    # ---- what sessions need

    def loads(self) -> list[NodeLoad]:
        """Return every usable node's load."""
        return [
            member.ledger.load(member.hello, member.status, is_doubtful=member.is_doubtful)
            for member in self.members
            if member.hello and member.is_usable
        ]

    def doubt(self, node: Incarnation, now_s: float) -> None:
        """Take another node's word that this one is lost: it gets no new work until it speaks again, or its stream breaks."""
        member = self._by_incarnation.get(node)
        if member is not None and member.doubted_s is None:
            member.doubted_s = now_s
            self._log(member, logging.INFO, "in doubt: its peer lost it")

    def eos_token_ids(self, node: Incarnation) -> frozenset[int]:
        """Return the model's end-of-sequence ids, as the node knows them."""
        hello = self.hello(node)
        return frozenset() if hello is None else hello.eos_token_ids

    def hello(self, node: Incarnation) -> Hello | None:
        """Return what an attached node said of itself."""
        member = self._by_incarnation.get(node)
        return None if member is None else member.hello

    def send(self, node: Incarnation, messages: Iterable[node_pb2.AttachRequest]) -> bool:
        """Hand messages to a node's stream. False if it is gone or full."""
        member = self._by_incarnation.get(node)
        if member is None or member.send is None:
            return False
        member.is_broken = member.is_broken or not all(member.send(message) for message in messages)
        return not member.is_broken

    def placed(self, node: Incarnation, leg: LegId, num_tokens: int) -> None:
        """Count a leg against its node until the node's own numbers show it."""
        member = self._by_incarnation.get(node)
        if member is not None:
            member.ledger.place(leg, num_tokens)

    def leg_started(self, node: Incarnation, leg: LegId) -> None:
        """Say that a leg gives tokens."""
        member = self._by_incarnation.get(node)
        if member is not None:
            member.ledger.started(leg)

    def leg_over(self, node: Incarnation, leg: LegId) -> None:
        """Say that a leg is over."""
        member = self._by_incarnation.get(node)
        if member is not None:
            member.ledger.over(leg)

    # ---- what the server shows

    @property
    def is_ready(self) -> bool:
        """Whether a prefill and a decode node of equal identity are usable."""
        loads = self.loads()
        return any(
            can_pair(prefill, decode)
            for prefill in loads
            for decode in loads
            if (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
        )

    def why_empty(self) -> str:
        """Return how the addresses stand that are not usable, for an error message."""
        reasons = [
            f"the router was given no {role.label} address"
            for role in (Role.PREFILL, Role.DECODE)
            if not any(member.role is role for member in self.members)
        ]
        reasons += [
            f"{member.role.label} {member.address} is {member.state}" + (f" ({member.reason})" if member.reason else "")
            for member in self.members
            if not member.is_usable
        ]
        return "; ".join(reasons)

    def rows(self) -> list[NodeRow]:
        """Return every node for GetClusterState."""
        return [
            NodeRow(
                member.address,
                str(member.state),
                member.reason,
                member.hello.process if member.hello else None,
                member.status.gauges if member.hello else {},
                tuple(at.address for at in member.hello.kv_endpoints) if member.hello else (),
            )
            for member in self.members
        ]

    def gauges(self) -> dict[str, float]:
        """Return nodes by state, legs that wait on them, and legs that run."""
        counts = {f"nodes.{state}": 0.0 for state in NodeState}
        for member in self.members:
            counts[f"nodes.{member.state}"] += 1
        ledgers = [member.ledger for member in self.members if member.hello]
        return counts | {
            "legs_outstanding": float(sum(ledger.num_outstanding for ledger in ledgers)),
            "legs_running": float(sum(ledger.num_running for ledger in ledgers)),
        }

    def _changed(self) -> None:
        for member in self.members:
            if member.hello is not None:
                self._settle_state(member)
        self._tell_peers()
        self.on_change()

    def _settle_state(self, member: Member) -> None:
        """Set an attached node's state: usable once its KV link to at least one node of the other role stands."""
        was, had_reason = member.state, member.reason
        if member.is_stuck:
            member.state, member.reason = NodeState.DOWN, "stuck step"
        elif member.status.is_draining:
            member.state, member.reason = NodeState.DRAINING, ""
        elif any(_are_linked(member, peer) for peer in self.members):
            member.state, member.reason = NodeState.READY, ""
        else:
            member.state, member.reason = NodeState.CONNECTING, self._why_unlinked(member)
        if member.state is not was or (member.reason != had_reason and member.state is NodeState.CONNECTING):
            is_bad = member.state is NodeState.DOWN or DIFFERS in member.reason
            level = logging.WARNING if is_bad else logging.INFO
            self._log(member, level, f"{member.state}: {member.reason}" if member.reason else member.state)

    def _why_unlinked(self, member: Member) -> str:
        """Why no KV link stands; with what differs, if no attached peer can ever be linked."""
        other = Role.DECODE if member.role is Role.PREFILL else Role.PREFILL
        told = f"no KV link to any {other.label} node"
        differences = {
            peer.address: member.hello.differences(peer.hello)
            for peer in self.members
            if peer.role is other and peer.hello and member.hello
        }
        if not differences or not all(differences.values()):
            return told
        address, fields = next(iter(differences.items()))
        more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
        return f"{told}: {address} {DIFFERS} {', '.join(fields)}{more}"

    def _tell_peers(self) -> None:
        """Tell every attached node the nodes of the other role that it may work with, if that changed."""
        attached = [member for member in self.members if member.hello is not None]
        for member in attached:
            others = [peer for peer in attached if _are_peers(member, peer)]
            peers = [(peer.hello, peer.status.kv_admission_key) for peer in others if peer.hello]
            names = tuple((hello.incarnation, key) for hello, key in peers)
            if names != member.told_peers and member.send is not None:
                member.told_peers = names
                member.send(pb_nodes.peers_message(peers))

    def _log(self, member: Member, level: int, message: str) -> None:
        incarnation = member.hello.incarnation.hex()[:8] if member.hello else ""
        extra = {"peer": member.address, "incarnation": incarnation}
        logger.log(level, "%s node %s", member.role.label, message, extra=extra)


def _nothing_changes() -> None:
    """Stand in until somebody listens."""


def _nobody_is_lost(node: Incarnation, reason: str) -> None:
    """Stand in until somebody listens."""


def _are_linked(member: Member, peer: Member) -> bool:
    """Whether the KV handshake between two attached nodes is done, as either of them says."""
    if member.hello is None or peer.hello is None or not _are_peers(member, peer):
        return False
    return (
        peer.hello.incarnation in member.status.connected_peers
        or member.hello.incarnation in peer.status.connected_peers
    )


def _are_peers(member: Member, peer: Member) -> bool:
    mine, theirs = member.hello, peer.hello
    if mine is None or theirs is None or member.role is peer.role:
        return False
    return mine.identity.digest() == theirs.identity.digest()
