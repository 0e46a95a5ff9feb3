"""The decode node's link from one prefill connection: handshake, lease, window and beats; no sockets, no clock."""

import secrets
from collections import deque
from enum import Enum, auto

from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.kvtransfer import handshake
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.codec import NONCE_BYTES
from pdserve.kvtransfer.events import PeerDown, PeerRefused, PeerUp
from pdserve.kvtransfer.instructions import Emit, Send
from pdserve.kvtransfer.messages import PROTOCOL_VERSION, Beat, Challenge, HeadRange, Hello, Refuse, Welcome
from pdserve.kvtransfer.receive_window import ReceiveBudget, ReceiveWindow
from pdserve.kvtransfer.receiver import ReceiveInstruction
from pdserve.kvtransfer.settings import LinkSettings


class ReceiverLinkState(Enum):
    """Where a connection stands on the decode node."""

    NEW = auto()
    CHALLENGED = auto()
    """A proof of the cluster secret is asked for."""
    PARKED = auto()
    """HELLO is good, but no router has named this prefill node yet."""
    UP = auto()
    CLOSED = auto()


class ReceiverLinkTrigger(Enum):
    """What can happen to it."""

    CHALLENGE = auto()
    PARK = auto()
    WELCOME = auto()
    REFUSE = auto()
    LOST = auto()


S, T = ReceiverLinkState, ReceiverLinkTrigger
_MOVES = (
    {
        (S.NEW, T.CHALLENGE): S.CHALLENGED,
        (S.CHALLENGED, T.CHALLENGE): S.CHALLENGED,
        (S.NEW, T.PARK): S.PARKED,
        (S.CHALLENGED, T.PARK): S.PARKED,
    }
    | {(state, T.WELCOME): S.UP for state in (S.NEW, S.CHALLENGED, S.PARKED)}
    | {(state, event): S.CLOSED for state in S if state is not S.CLOSED for event in (T.REFUSE, T.LOST)}
)

RECEIVER_LINK_TABLE = TransitionTable(
    name="receiver link",
    initial=S.NEW,
    terminal=frozenset({S.CLOSED}),
    moves=_MOVES,
    ignored=frozenset((state, event) for state in S for event in T) - _MOVES.keys(),
)


class ReceiverLink:
    """State of one connection. What follows from an event is appended to `out`."""

    def __init__(
        self,
        route: Route,
        settings: LinkSettings,
        budget: ReceiveBudget,
        out: deque[ReceiveInstruction],
        now_s: float,
    ) -> None:
        self.route = route
        self.life = LifeCycle(RECEIVER_LINK_TABLE, route.hex(), now_s)
        self.peer: Incarnation | None = None
        """Known from the first HELLO that passed all checks."""
        self._window: ReceiveWindow | None = None
        self._budget = budget
        self._settings = settings
        self._out = out
        self._challenge = b""
        self._nonce = b""
        self._proven_with: bytes | None = None
        """The value of the cluster secret that the peer proved to know, and gets its own proof by."""
        self._due_s = now_s + settings.lease_s
        self._heard_until_s = now_s + settings.lease_s

    @property
    def is_up(self) -> bool:
        """Whether transfers may use it."""
        return self.life.state is S.UP

    @property
    def is_parked(self) -> bool:
        """Whether it waits for a router to name the peer."""
        return self.life.state is S.PARKED

    @property
    def is_over(self) -> bool:
        """Whether it is closed."""
        return self.life.is_terminal

    @property
    def due_s(self) -> float:
        """When `expire` wants to be called."""
        return min(self._due_s, self._heard_until_s) if self.is_up else self._due_s

    @property
    def window(self) -> ReceiveWindow:
        """What may be under way; from WELCOME on."""
        assert self._window is not None
        return self._window

    def hello(self, message: Hello, peers: frozenset[Incarnation], now_s: float) -> bool:
        """HELLO came, for the first time or again. Return True if the link is to be welcomed now."""
        if self.is_up:
            self.life.num_ignored += 1
            self._send_welcome()
            return False
        if self._settings.secret is not None and not message.proof:
            # Before the proof a stranger learns nothing, not even what would fit.
            if self.life.advance(T.CHALLENGE, now_s):
                self._challenge = secrets.token_bytes(NONCE_BYTES)
                self._out.append(Send(self.route, Challenge(self._challenge)))
            return False
        faults, detail = self._faults(message)
        if faults:
            named = message.incarnation if message.incarnation in peers else None
            self.refuse(faults, detail, False, now_s)
            if named is not None:
                self._out.append(Emit(PeerRefused(named, faults, detail)))
            return False
        self.peer, self._nonce = message.incarnation, message.nonce
        if message.incarnation in peers:
            return True
        if self.life.advance(T.PARK, now_s):
            self._due_s = now_s + self._settings.park_s
        return False

    def welcome(self, now_s: float) -> None:
        """The peer is known and fits."""
        if self.life.advance(T.WELCOME, now_s):
            assert self.peer is not None
            self._window = self._budget.open(self.route)
            self._due_s = now_s + self._settings.beat_s
            self.heard(now_s)
            self._send_welcome()
            self._out.append(Emit(PeerUp(self.peer)))

    def refuse(self, fields: tuple[str, ...], detail: str, can_retry: bool, now_s: float) -> None:
        """Close it and say why."""
        was_up = self.is_up
        if self.life.advance(T.REFUSE, now_s):
            self._out.append(Send(self.route, Refuse(fields, detail, can_retry)))
            self._closed(was_up, "refused: " + ", ".join(fields))

    def lost(self, reason: str, now_s: float) -> None:
        """The connection is gone or silent."""
        was_up = self.is_up
        if self.life.advance(T.LOST, now_s):
            self._closed(was_up, reason)

    def heard(self, now_s: float) -> None:
        """Any message is a sign of life."""
        self._heard_until_s = now_s + self._settings.lease_s

    def extend_lease(self, late_s: float) -> None:
        """This process itself was late by that much, so silence proves less."""
        self._heard_until_s += late_s

    def needs(self, transfer_id: TransferId, num_bytes: int) -> None:
        """A transfer on this link has that much to bring; with more than before, the window may have to grow at once."""
        if self.window.set_need(transfer_id, num_bytes):
            self.offer_window()

    def offer_window(self) -> None:
        """Tell the sender of its window when it is time: few beats, and the sender never waits for one."""
        if self.window.grow():
            self.tell_window()

    def tell_window(self) -> None:
        """Tell the sender of its window."""
        self._out.append(Send(self.route, Beat(self.window.limit)))

    def expire(self, parked: tuple[TransferId, ...], now_s: float) -> str | None:
        """Do what is due: beat, or give up. Return why the link is lost if it is."""
        if self.is_parked:
            self.refuse(("peer",), "no router has named this prefill node", True, now_s)
            return None
        if not self.is_up:
            return "handshake not finished"
        if now_s >= self._heard_until_s:
            # The peer may live and only not be heard; then it should not wait for its own lease.
            self._out.append(Send(self.route, Refuse(("lease",), "nothing was heard", can_retry=True)))
            return "lease expired"
        self._due_s = now_s + self._settings.beat_s
        self.window.top_up()
        self._out.append(Send(self.route, Beat(self.window.limit, parked)))
        return None

    def describe(self, now_s: float) -> dict[str, object]:
        """Return its state for people."""
        return {
            "link_from": self.peer.hex() if self.peer is not None else "",
            "state": self.life.state.name,
            "age_s": round(self.life.age_s(now_s), 3),
            "received_bytes": 0 if self._window is None else self._window.received,
            "window_limit": 0 if self._window is None else self._window.limit,
            "needed_bytes": 0 if self._window is None else self._window.need_bytes,
            "story": self.life.tell(),
        }

    def _faults(self, message: Hello) -> tuple[tuple[str, ...], str]:
        mine, secret = self._settings.incarnation, self._settings.secret
        if message.protocol_version != PROTOCOL_VERSION or message.offer is None:
            return ("protocol_version",), f"version {message.protocol_version}, spoken here is {PROTOCOL_VERSION}"
        if secret is not None:
            # A challenge belongs to one connection, so a recorded HELLO proves nothing on another.
            asked, self._proven_with = self._challenge, None
            if asked:
                given, peer = message.proof, message.incarnation
                self._proven_with = handshake.proven_with(given, secret, handshake.HELLO_LABEL, asked, peer, mine)
            if self._proven_with is None:
                return ("proof",), "the cluster secret differs"
        if message.expected != mine:
            return ("incarnation",), "this is another process than the one meant"
        return handshake.differences(self._settings.offer, message.offer), ""

    def _closed(self, was_up: bool, reason: str) -> None:
        self._due_s = float("inf")
        if self._window is not None:
            self._budget.close(self._window)
        if was_up and self.peer is not None:
            self._out.append(Emit(PeerDown(self.peer, reason)))

    def _send_welcome(self) -> None:
        assert self.peer is not None
        mine, value = self._settings.incarnation, self._proven_with
        proven = b""
        if value is not None:
            proven = handshake.proof(value, handshake.WELCOME_LABEL, self._nonce, self.peer, mine)
        everything = (HeadRange(0, 0),)
        welcome = Welcome(mine, everything, self._settings.reserve_policy, self.window.limit, proven)
        self._out.append(Send(self.route, welcome))
