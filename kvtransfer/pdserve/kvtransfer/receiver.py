"""One transfer on the decode node: from a router's submit to adoption, as a machine without sockets and without a clock."""

from collections import deque
from enum import Enum, auto

from pdserve.core.layout import KvLayout
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.coverage import Coverage
from pdserve.kvtransfer.events import (
    FinishedEarly,
    Opened,
    ReceiveClosed,
    Received,
    ReceiveEvent,
    ReceiveFailed,
    Reopened,
    TransferSpec,
    TransferStats,
)
from pdserve.kvtransfer.instructions import Emit, Place, Send
from pdserve.kvtransfer.messages import (
    ALL_HEADS,
    Abort,
    Ack,
    Commit,
    Data,
    Gone,
    GoneKind,
    Grant,
    Nack,
    NackReason,
    Open,
)
from pdserve.kvtransfer.settings import MAX_REOPENS, LinkSettings
from pdserve.kvtransfer.wire import checksum

ReceiveInstruction = Send | Place | Emit[ReceiveEvent]


class ReceiveState(Enum):
    """Where a transfer stands on the decode node."""

    EXPECTED = auto()
    """A router submitted it; OPEN has not come."""
    OPENED = auto()
    """OPEN came; the node has not granted."""
    GRANTED = auto()
    """DATA may come; blocks are promised."""
    SEVERED = auto()
    """The connection that it was opened on is lost; OPEN has not come again on another."""
    RECEIVED = auto()
    FINISHED_EARLY = auto()
    FAILED = auto()
    CANCELLED = auto()
    """The node refused or cancelled it."""


class ReceiveTrigger(Enum):
    """What can happen to it."""

    OPEN = auto()
    GRANT = auto()
    REFUSE = auto()
    DATA = auto()
    COMMIT = auto()
    ABORT = auto()
    FINISHED = auto()
    CANCEL = auto()
    FAULT = auto()
    """A frame that does not fit, or a placement that failed."""
    LINK_LOST = auto()
    EXPIRE = auto()


S, T = ReceiveState, ReceiveTrigger
_LIVE = (S.EXPECTED, S.OPENED, S.GRANTED, S.SEVERED)
_MOVES = (
    {
        (S.EXPECTED, T.OPEN): S.OPENED,
        (S.OPENED, T.GRANT): S.GRANTED,
        (S.GRANTED, T.DATA): S.GRANTED,
        (S.GRANTED, T.COMMIT): S.RECEIVED,
        (S.OPENED, T.LINK_LOST): S.SEVERED,
        (S.GRANTED, T.LINK_LOST): S.SEVERED,
        # The node was asked before the connection broke, and answers now; the sender hears of it when it opens again.
        (S.SEVERED, T.GRANT): S.SEVERED,
        (S.SEVERED, T.OPEN): S.OPENED,
    }
    | {(state, event): S.CANCELLED for state in _LIVE for event in (T.CANCEL, T.REFUSE)}
    | {(state, event): S.FAILED for state in _LIVE for event in (T.ABORT, T.FAULT, T.EXPIRE)}
    | {(state, T.FINISHED): S.FINISHED_EARLY for state in _LIVE}
)

RECEIVE_TABLE = TransitionTable(
    name="receive transfer",
    initial=S.EXPECTED,
    terminal=frozenset(S) - frozenset(_LIVE),
    moves=_MOVES,
    ignored=frozenset((state, event) for state in S for event in T) - _MOVES.keys(),
)
"""Every pair that is no move can be caused by a late or repeated message, or by a node that was told late.

DATA and COMMIT before GRANT are not among them: the machine turns those into FAULT before it asks the table.
"""


class ReceiveTransfer:
    """State of one incoming transfer. Methods are events; what follows from them is appended to `out`."""

    def __init__(
        self, spec: TransferSpec, settings: LinkSettings, out: deque[ReceiveInstruction], now_s: float
    ) -> None:
        self.spec = spec
        self.life = LifeCycle(RECEIVE_TABLE, spec.transfer_id.hex(), now_s)
        self.route: Route | None = None
        self.due_s = now_s + settings.open_wait_s
        self.answer: Ack | Nack | Abort | Gone = Gone(spec.transfer_id, GoneKind.OVER)
        """What a repeated OPEN or COMMIT is answered with after the end."""
        self._settings = settings
        self._out = out
        self._coverage = Coverage(settings.layout, spec.num_tokens)
        self._skip_tokens = 0
        self._is_promised = False
        """The node granted; that holds on each connection."""
        self._num_losses = 0
        self._lost_because = ""
        self._sequence = 0
        """Frames on this connection."""
        self._missing_bytes = 0
        self._num_frames = 0
        self._kv_bytes = 0
        self._place_s = 0.0
        self._opened_s = now_s
        self._grant_wait_s = 0.0
        self._silent_until_s = 0.0
        """How long beats alone may keep a granted transfer alive."""

    @property
    def is_over(self) -> bool:
        """Whether its last event has been emitted."""
        return self.life.is_terminal

    @property
    def missing_bytes(self) -> int:
        """What may still come, as far as the grant and the frames so far tell."""
        return self._missing_bytes if self.life.state is S.GRANTED else 0

    @property
    def stats(self) -> TransferStats:
        """What it took so far."""
        return TransferStats(
            kv_bytes=self._kv_bytes,
            num_frames=self._num_frames,
            place_s=self._place_s,
            grant_wait_s=self._grant_wait_s,
        )

    def opened(self, message: Open, route: Route, now_s: float, came_s: float | None = None) -> None:
        """OPEN came, for the first time or again; it was parked since `came_s` if that is given."""
        mismatch = self._open_mismatch(message)
        if mismatch:
            self.route = route
            self.fault(NackReason.MISMATCH, mismatch, now_s)
        elif self.life.advance(T.OPEN, now_s):
            self.route = route
            self.due_s = now_s + self._settings.grant_wait_s
            if self._num_losses:
                self._opened_again(now_s)
                return
            self._opened_s = now_s if came_s is None else came_s
            self._out.append(Emit(Opened(self.spec.transfer_id)))
        elif self.life.state is S.GRANTED:
            self._send(Grant(self.spec.transfer_id, self._skip_tokens))

    def grant(self, skip_tokens: int, now_s: float) -> None:
        """The node promises blocks and holds the first `skip_tokens` positions already."""
        if self._is_promised or not self.life.advance(T.GRANT, now_s):
            return
        self._is_promised = True
        self._skip_tokens = skip_tokens
        self._grant_wait_s = now_s - self._opened_s
        if self.life.state is S.GRANTED:
            self._tell_grant(now_s)

    def refuse(self, reason: str, now_s: float) -> None:
        """The node will not take it."""
        known = NackReason.__members__.get(reason)
        nack = Nack(self.spec.transfer_id, known or NackReason.REFUSED, "" if known else reason)
        if self.life.advance(T.REFUSE, now_s):
            self._end(nack)

    def cancel(self, reason: str, busy: bool, now_s: float) -> None:
        """The node has no use for it any more, or (`busy`) no room."""
        if self.life.advance(T.CANCEL, now_s):
            self._end(Abort(self.spec.transfer_id, finished=False, reason=reason, busy=busy))

    def data(self, message: Data, payload: memoryview, now_s: float) -> None:
        """DATA came: check everything, then have it placed."""
        if self.is_over:
            self.life.advance(T.DATA, now_s)
            return
        fault = self._data_fault(message, payload)
        if fault is not None:
            self.fault(*fault, now_s)
            return
        self.life.advance(T.DATA, now_s)
        if self._sequence == 0 and (taken := self._settings.taken_layout(message.dtype)) is not None:
            self._missing_bytes = self._bytes_in(taken)
        self._missing_bytes = max(0, self._missing_bytes - message.num_bytes)
        self._sequence += 1
        self._num_frames += 1
        self._kv_bytes += message.num_bytes
        self._coverage.add(message.layers, message.tokens)
        self._renew(now_s)
        self._out.append(Place(self.spec.transfer_id, message.layers, message.tokens, payload))

    def placed(self, place_s: float) -> None:
        """The last payload lies in the pool."""
        self._place_s += place_s

    def committed(self, message: Commit, now_s: float) -> None:
        """COMMIT came: adopt if nothing is missing."""
        if self.is_over:
            self.life.advance(T.COMMIT, now_s)
            return
        fault = self._commit_fault(message)
        if fault is not None:
            self.fault(*fault, now_s)
            return
        self.life.advance(T.COMMIT, now_s)
        received = Received(self.spec.transfer_id, message.tokens, dict(message.durations_s), self.stats)
        self._out.append(Emit(received))
        self._end(Ack(self.spec.transfer_id))

    def aborted(self, message: Abort, now_s: float) -> None:
        """The prefill node gave up, or has nothing to hand over."""
        if message.finished:
            if self.life.advance(T.FINISHED, now_s):
                self._out.append(Emit(FinishedEarly(self.spec.transfer_id)))
                self._end(None)
        else:
            self._fail(T.ABORT, "peer_aborted", message.reason, None, now_s, busy=message.busy)

    def fault(self, reason: NackReason, detail: str, now_s: float) -> None:
        """A frame does not fit, a placement failed, or its connection is damaged."""
        nack = Nack(self.spec.transfer_id, reason, detail)
        self._fail(T.FAULT, reason.label, detail, nack, now_s)

    def stopped(self, reason: str, detail: str, now_s: float) -> None:
        """This node's end of the corridor ends."""
        self._fail(T.FAULT, reason, detail, Nack(self.spec.transfer_id, NackReason.SHUTDOWN, detail), now_s)

    def link_lost(self, reason: str, now_s: float) -> None:
        """The connection that it was opened on is lost: what came counts no more, what the node granted does.

        The sender owns the wait for the next connection.
        """
        if self._num_losses == MAX_REOPENS:
            self._fail(T.FAULT, "peer_lost", f"{reason}; its connection broke {MAX_REOPENS + 1} times", None, now_s)
        elif self.life.advance(T.LINK_LOST, now_s):
            self._num_losses += 1
            self._lost_because = reason
            self.route = None
            self._sequence = 0
            self._coverage = Coverage(self._settings.layout, self.spec.num_tokens)
            self.due_s = now_s + self._settings.connect_wait_s + 2 * self._settings.lease_s

    def alive(self, now_s: float) -> None:
        """The sender's beat names it: no news is not yet a loss."""
        if self.life.state is S.GRANTED:
            self.due_s = max(self.due_s, min(now_s + self._settings.transfer_idle_s, self._silent_until_s))

    def expire(self, now_s: float) -> None:
        """Its time is up."""
        detail = f"{self.life.state.name.lower()} for {self.life.age_s(now_s):.1f} s"
        if self.life.state is S.EXPECTED:
            self._fail(T.EXPIRE, "no_open", detail, None, now_s)
        elif self.life.state is S.SEVERED:
            self._fail(T.EXPIRE, "peer_lost", f"{detail}; lost: {self._lost_because}", None, now_s)
        elif self.life.state is S.OPENED:
            nack = Nack(self.spec.transfer_id, NackReason.BUSY, detail)
            self._fail(T.EXPIRE, "no_grant", detail, nack, now_s, busy=True)
        else:
            self._fail(T.EXPIRE, "kv_nack_idle", detail, Nack(self.spec.transfer_id, NackReason.IDLE, detail), now_s)

    def describe(self, now_s: float) -> dict[str, object]:
        """Return its state for people."""
        return {
            "transfer": self.spec.transfer_id.hex(),
            "attempt": self.spec.attempt,
            "peer": self.spec.peer.hex(),
            "state": self.life.state.name,
            "age_s": round(self.life.age_s(now_s), 3),
            "due_in_s": round(self.due_s - now_s, 3),
            "num_frames": self._num_frames,
            "kv_bytes": self._kv_bytes,
            "losses": self._num_losses,
            "ignored": self.life.num_ignored,
            "story": self.life.tell(),
        }

    def _opened_again(self, now_s: float) -> None:
        """OPEN came on another connection: the node is not asked twice, and its promise is told again."""
        self._out.append(Emit(Reopened(self.spec.transfer_id, self._lost_because)))
        if self._is_promised:
            self.life.advance(T.GRANT, now_s)
            self._tell_grant(now_s)

    def _tell_grant(self, now_s: float) -> None:
        # A sender that may send in 8 bits mostly does; the first frame says whether this one does.
        self._missing_bytes = self._bytes_in(self._settings.wire_layout)
        self._renew(now_s)
        self._send(Grant(self.spec.transfer_id, self._skip_tokens))

    def _bytes_in(self, layout: KvLayout) -> int:
        return layout.range_bytes(range(layout.num_layers), self.spec.num_tokens - self._skip_tokens)

    def _renew(self, now_s: float) -> None:
        """Something came. The sender owns the wait for what is still computed; beats must not stretch it for ever."""
        self.due_s = now_s + self._settings.transfer_idle_s
        self._silent_until_s = now_s + self._settings.produce_wait_s + 2 * self._settings.lease_s

    def _open_mismatch(self, message: Open) -> str:
        spec = self.spec
        if message.attempt != spec.attempt:
            return f"attempt {message.attempt}, submitted is {spec.attempt}"
        if message.prompt_digest != spec.prompt_digest:
            return "another prompt digest than submitted"
        if message.num_tokens != spec.num_tokens:
            return f"{message.num_tokens} tokens, submitted are {spec.num_tokens}"
        return f"rank {message.rank}, only rank 0 is served" if message.rank else ""

    def _data_fault(self, message: Data, payload: memoryview) -> tuple[NackReason, str] | None:
        layout = self._settings.layout
        if self.life.state is not S.GRANTED:
            return NackReason.ORDER, f"DATA while {self.life.state.name}"
        if message.attempt != self.spec.attempt:
            return NackReason.MISMATCH, f"attempt {message.attempt}, submitted is {self.spec.attempt}"
        if message.sequence != self._sequence:
            return NackReason.GAP, f"frame {message.sequence}, expected {self._sequence}"
        taken = self._settings.taken_layout(message.dtype)
        if taken is None or message.heads != ALL_HEADS:
            return NackReason.LAYOUT, f"{message.dtype} of heads {message.heads}"
        if message.layers.stop > layout.num_layers:
            return NackReason.RANGE, f"layers {message.layers} of {layout.num_layers}"
        if message.tokens.start < self._skip_tokens or message.tokens.stop > self.spec.num_tokens:
            return NackReason.RANGE, f"tokens {message.tokens}, granted [{self._skip_tokens}, {self.spec.num_tokens})"
        if message.num_bytes != taken.range_bytes(message.layers, len(message.tokens)):
            return NackReason.LAYOUT, f"{message.num_bytes} bytes do not fit the ranges"
        if self._coverage.overlaps(message.layers, message.tokens):
            return NackReason.OVERLAP, f"layers {message.layers}, tokens {message.tokens} came before"
        if checksum(payload) != message.checksum:
            return NackReason.CHECKSUM, f"frame {message.sequence}"
        return None

    def _commit_fault(self, message: Commit) -> tuple[NackReason, str] | None:
        if self.life.state is not S.GRANTED:
            return NackReason.ORDER, f"COMMIT while {self.life.state.name}"
        if message.attempt != self.spec.attempt:
            return NackReason.MISMATCH, f"attempt {message.attempt}, submitted is {self.spec.attempt}"
        if message.num_frames != self._sequence:
            return NackReason.GAP, f"{message.num_frames} frames sent, {self._sequence} came"
        if not message.tokens:
            return NackReason.INCOMPLETE, "no first token"
        missing = self._coverage.missing(self._skip_tokens)
        if missing is not None:
            layer, tokens = missing
            return NackReason.INCOMPLETE, f"layer {layer} lacks tokens [{tokens.start}, {tokens.stop})"
        return None

    def _fail(
        self,
        trigger: ReceiveTrigger,
        reason: str,
        detail: str,
        answer: Nack | None,
        now_s: float,
        busy: bool = False,
    ) -> None:
        if self.life.advance(trigger, now_s):
            self._out.append(Emit(ReceiveFailed(self.spec.transfer_id, reason, detail, busy)))
            self._end(answer)

    def _end(self, answer: Ack | Nack | Abort | None) -> None:
        self.due_s = float("inf")
        if answer is not None:
            self.answer = answer
            if self.route is not None:
                self._send(answer)
        self._out.append(Emit(ReceiveClosed(self.spec.transfer_id)))

    def _send(self, message: Grant | Ack | Nack | Abort | Gone) -> None:
        assert self.route is not None
        self._out.append(Send(self.route, message))
