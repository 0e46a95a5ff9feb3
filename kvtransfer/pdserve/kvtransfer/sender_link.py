"""The prefill node's link to one decode incarnation: dialling, handshake, lease, window and beats; no sockets, no clock."""

import secrets
from collections import deque
from enum import Enum, auto

from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.kvtransfer import handshake
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.codec import MAX_BEAT_IDS, NONCE_BYTES
from pdserve.kvtransfer.events import PeerDown, PeerRefused, PeerUp
from pdserve.kvtransfer.instructions import Dial, Emit, HangUp, Send, Trust
from pdserve.kvtransfer.messages import Beat, Challenge, Hello, Refuse, Welcome
from pdserve.kvtransfer.sender import SendInstruction
from pdserve.kvtransfer.settings import MAX_FRAMES_IN_SOCKET, LinkSettings


class LinkState(Enum):
    """Where a link stands on the prefill node."""

    DOWN = auto()
    """No connection; dialled again when its pause is over."""
    DIALLING = auto()
    GREETING = auto()
    """HELLO is sent."""
    UP = auto()
    REFUSED = auto()
    """This pair can never work; stays until the router drops the peer."""
    CLOSED = auto()


class LinkTrigger(Enum):
    """What can happen to it."""

    DIAL = auto()
    CONNECTED = auto()
    CHALLENGE = auto()
    WELCOME = auto()
    REFUSE = auto()
    LOST = auto()
    DROP = auto()


S, T = LinkState, LinkTrigger
_MOVES = {
    (S.DOWN, T.DIAL): S.DIALLING,
    (S.DIALLING, T.CONNECTED): S.GREETING,
    (S.GREETING, T.CHALLENGE): S.GREETING,
    (S.GREETING, T.WELCOME): S.UP,
    (S.GREETING, T.REFUSE): S.REFUSED,
    (S.UP, T.REFUSE): S.REFUSED,
    (S.DIALLING, T.LOST): S.DOWN,
    (S.GREETING, T.LOST): S.DOWN,
    (S.UP, T.LOST): S.DOWN,
} | {(state, T.DROP): S.CLOSED for state in S if state is not S.CLOSED}

SENDER_LINK_TABLE = TransitionTable(
    name="sender link",
    initial=S.DOWN,
    terminal=frozenset({S.CLOSED}),
    moves=_MOVES,
    ignored=frozenset((state, event) for state in S for event in T) - _MOVES.keys(),
)


class SenderLink:
    """State of the link to one decode incarnation. What follows from an event is appended to `out`."""

    def __init__(
        self,
        peer: Incarnation,
        address: str,
        settings: LinkSettings,
        out: deque[SendInstruction],
        now_s: float,
    ) -> None:
        self.peer = peer
        self.address = address
        self.life = LifeCycle(SENDER_LINK_TABLE, peer.hex(), now_s)
        self.route: Route | None = None
        self.refused_fields: tuple[str, ...] = ()
        self.is_retiring = False
        """The router no longer lists the peer; the link goes when its transfers are over."""
        self.sent_bytes = 0
        self.window_limit = 0
        self.num_in_socket = 0
        self.num_peer_parked = 0
        self._settings = settings
        self._out = out
        self._nonce = b""
        self._pause_s = settings.retry_min_s
        self._due_s = now_s
        self._heard_until_s = 0.0

    @property
    def is_up(self) -> bool:
        """Whether transfers may use it."""
        return self.life.state is S.UP

    @property
    def due_s(self) -> float:
        """When `expire` wants to be called."""
        return min(self._due_s, self._heard_until_s) if self.is_up else self._due_s

    def has_room(self, num_bytes: int) -> bool:
        """Whether a DATA frame of this many payload bytes may be sent now."""
        fits = self.sent_bytes + num_bytes <= self.window_limit
        return self.is_up and fits and self.num_in_socket < MAX_FRAMES_IN_SOCKET

    def dialled(self, route: Route) -> None:
        """The shell opened a connection."""
        self.route = route

    def connected(self, now_s: float) -> None:
        """The connection stands: greet."""
        if self.life.advance(T.CONNECTED, now_s):
            self._nonce = secrets.token_bytes(NONCE_BYTES)
            # HELLO may be parked until the router has told the peer about us.
            self._due_s = now_s + self._settings.lease_s + self._settings.park_s
            self._send_hello(b"")

    def challenged(self, message: Challenge, now_s: float) -> None:
        """The peer wants a proof of the cluster secret."""
        secret = self._settings.secret
        if secret is None:
            self._refused(("secret",), "the peer asks for a cluster secret and none is set here", now_s)
        elif self.life.advance(T.CHALLENGE, now_s):
            mine = self._settings.incarnation
            self._send_hello(handshake.proof(secret.proving, handshake.HELLO_LABEL, message.challenge, mine, self.peer))

    def welcomed(self, message: Welcome, now_s: float) -> bool:
        """WELCOME came. Return True if the link is up by it."""
        if self.life.state is not S.GREETING:
            self.life.num_ignored += 1
            return False
        if message.incarnation != self.peer:
            self._refused(("incarnation",), "another process answers at this address", now_s)
            return False
        if not self._is_proven(message):
            self._refused(("proof",), "the peer does not prove to know the cluster secret", now_s)
            return False
        self.life.advance(T.WELCOME, now_s)
        self.sent_bytes = self.num_in_socket = 0
        self.window_limit = message.window_limit
        self._pause_s = self._settings.retry_min_s
        self._due_s = now_s + self._settings.beat_s
        self.heard(now_s)
        assert self.route is not None
        self._out.append(Trust(self.route))
        self._out.append(Emit(PeerUp(self.peer)))
        return True

    def refused(self, message: Refuse, now_s: float) -> str | None:
        """REFUSE came. Return why the link is lost if a new connection may help, else None."""
        if message.can_retry:
            return "refused: " + ", ".join(message.fields)
        self._refused(message.fields, message.detail, now_s)
        return None

    def heard(self, now_s: float) -> None:
        """Any message is a sign of life."""
        self._heard_until_s = now_s + self._settings.lease_s

    def extend_lease(self, late_s: float) -> None:
        """This process itself was late by that much, so silence proves less."""
        self._heard_until_s += late_s

    def beat(self, message: Beat) -> None:
        """BEAT came; the window only ever grows."""
        self.window_limit = max(self.window_limit, message.window_limit)
        self.num_peer_parked = len(message.transfer_ids)

    def expire(self, transfer_ids: tuple[TransferId, ...], now_s: float) -> str | None:
        """Do what is due: dial, or beat. Return why the link is lost if it is."""
        if self.life.state is S.DOWN:
            self.life.advance(T.DIAL, now_s)
            self._due_s = now_s + self._settings.lease_s
            self._out.append(Dial(self.peer, self.address))
            return None
        if self.life.state in (S.DIALLING, S.GREETING):
            return f"no answer while {self.life.state.name.lower()}"
        if not self.is_up:
            self._due_s = float("inf")
            return None
        if now_s >= self._heard_until_s:
            return "lease expired"
        self._due_s = now_s + self._settings.beat_s
        for start in range(0, max(1, len(transfer_ids)), MAX_BEAT_IDS):
            self._send(Beat(0, transfer_ids[start : start + MAX_BEAT_IDS]))
        return None

    def lost(self, reason: str, now_s: float) -> None:
        """The connection is of no use any more; dial again after a pause."""
        was_up = self.is_up
        if self.life.advance(T.LOST, now_s):
            self._hang_up()
            self._due_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._settings.retry_max_s)
            if was_up:
                self._out.append(Emit(PeerDown(self.peer, reason)))

    def drop(self, reason: str, now_s: float) -> None:
        """The router does not list the peer any more, or the node stops."""
        was_up = self.is_up
        if self.life.advance(T.DROP, now_s):
            self._hang_up()
            self._due_s = float("inf")
            if was_up:
                self._out.append(Emit(PeerDown(self.peer, reason)))

    def describe(self, now_s: float) -> dict[str, object]:
        """Return its state for people."""
        return {
            "link_to": self.peer.hex(),
            "address": self.address,
            "state": self.life.state.name,
            "age_s": round(self.life.age_s(now_s), 3),
            "sent_bytes": self.sent_bytes,
            "window_limit": self.window_limit,
            "num_in_socket": self.num_in_socket,
            "refused_fields": list(self.refused_fields),
            "story": self.life.tell(),
        }

    def _refused(self, fields: tuple[str, ...], detail: str, now_s: float) -> None:
        was_up = self.is_up
        if self.life.advance(T.REFUSE, now_s):
            self.refused_fields = fields
            self._hang_up()
            self._due_s = float("inf")
            if was_up:
                self._out.append(Emit(PeerDown(self.peer, "refused")))
            self._out.append(Emit(PeerRefused(self.peer, fields, detail)))

    def _is_proven(self, message: Welcome) -> bool:
        secret = self._settings.secret
        if secret is None:
            return True
        mine = self._settings.incarnation
        label, nonce = handshake.WELCOME_LABEL, self._nonce
        return handshake.proven_with(message.proof, secret, label, nonce, mine, self.peer) is not None

    def _hang_up(self) -> None:
        if self.route is not None:
            self._out.append(HangUp(self.route))
        self.route = None
        self.num_in_socket = 0

    def _send_hello(self, proof: bytes) -> None:
        self._send(Hello(self._settings.incarnation, self.peer, self._nonce, self._settings.offer, proof))

    def _send(self, message: Hello | Beat) -> None:
        assert self.route is not None
        self._out.append(Send(self.route, message))
