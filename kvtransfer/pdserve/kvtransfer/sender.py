"""One transfer on the prefill node: from the node's `open` to ACK, as a machine without sockets and without a clock."""

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto

from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import SampledToken
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import (
    Acked,
    Granted,
    Reopened,
    SendClosed,
    SendEvent,
    SendFailed,
    TransferSpec,
    TransferStats,
)
from pdserve.kvtransfer.framing import FramePlanner, FrameRange
from pdserve.kvtransfer.instructions import Dial, Emit, HangUp, Send, Trust
from pdserve.kvtransfer.messages import Abort, Commit, Data, Gone, Nack, NackReason, Open
from pdserve.kvtransfer.settings import MAX_REOPENS, LinkSettings

SendInstruction = Dial | Trust | HangUp | Send | Emit[SendEvent]


class SendState(Enum):
    """Where a transfer stands on the prefill node."""

    WAITING = auto()
    """No usable link to the decode node: not yet, or not any more."""
    OPENING = auto()
    """OPEN is sent; GRANT has not come."""
    STREAMING = auto()
    """Granted: DATA goes as it becomes ready, COMMIT after the last."""
    COMMITTED = auto()
    """COMMIT is sent; ACK has not come."""
    ACKED = auto()
    FAILED = auto()
    ABORTED = auto()


class SendTrigger(Enum):
    """What can happen to it."""

    LINK_UP = auto()
    READY = auto()
    GRANT = auto()
    COMMIT = auto()
    ACK = auto()
    ABORT = auto()
    """The node gives up, or the request ended at its first token."""
    NACK = auto()
    PEER_ABORT = auto()
    GONE = auto()
    LINK_LOST = auto()
    LINK_REFUSED = auto()
    EXPIRE = auto()
    FAULT = auto()
    """Packing raised, or the node marked what does not exist."""


S, T = SendState, SendTrigger
_LIVE = (S.WAITING, S.OPENING, S.STREAMING, S.COMMITTED)
_ENDED = (S.ACKED, S.FAILED, S.ABORTED)
_MOVES = (
    {
        (S.WAITING, T.LINK_UP): S.OPENING,
        (S.WAITING, T.READY): S.WAITING,
        (S.OPENING, T.READY): S.OPENING,
        (S.OPENING, T.GRANT): S.STREAMING,
        (S.STREAMING, T.READY): S.STREAMING,
        (S.STREAMING, T.COMMIT): S.COMMITTED,
        (S.COMMITTED, T.ACK): S.ACKED,
        # COMMIT was said and answered on a connection that is lost; the OPEN on the next one gets the answer again.
        (S.OPENING, T.ACK): S.ACKED,
    }
    | {(state, T.LINK_LOST): S.WAITING for state in _LIVE[1:]}
    | {(state, T.ABORT): S.ABORTED for state in _LIVE}
    | {(state, event): S.FAILED for state in _LIVE for event in (T.LINK_REFUSED, T.EXPIRE, T.FAULT)}
    | {(state, event): S.FAILED for state in _LIVE[1:] for event in (T.NACK, T.PEER_ABORT, T.GONE)}
)

SEND_TABLE = TransitionTable(
    name="send transfer",
    initial=S.WAITING,
    terminal=frozenset(_ENDED),
    moves=_MOVES,
    ignored=frozenset((state, event) for state in S for event in T) - _MOVES.keys(),
)
"""Every pair that is no move can be caused by a late, repeated or misguided message, or by a node that was told late."""


class SendTransfer:
    """State of one outgoing transfer. Methods are events; what follows from them is appended to `out`."""

    def __init__(self, spec: TransferSpec, settings: LinkSettings, out: deque[SendInstruction], now_s: float) -> None:
        self.spec = spec
        self.life = LifeCycle(SEND_TABLE, spec.transfer_id.hex(), now_s)
        self.route: Route | None = None
        self._settings = settings
        self._out = out
        self._planner = FramePlanner(settings.wire_layout, spec.num_tokens)
        self._commit: Commit | None = None
        self._commit_asked_s = 0.0
        self._was_commit_said = False
        """On any connection: from then on the decode node may have adopted it."""
        self._granted_skip: int | None = None
        """What GRANT said; the decode node holds to it on each connection."""
        self._asked_since_s: float | None = None
        """When OPEN was first said, until GRANT comes."""
        self._deadline_s = now_s + settings.connect_wait_s
        self._repeat_s = float("inf")
        self._no_link_because = ""
        self._num_losses = 0
        self._lost_because = ""
        self._sequence = 0
        """Frames on this connection."""
        self._stalled_since_s: float | None = None
        self._num_frames = 0
        self._kv_bytes = 0
        self._pack_s = 0.0
        self._grant_wait_s = 0.0
        self._exposed_s = 0.0
        self._stalled_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether its last event has been emitted."""
        return self.life.is_terminal

    @property
    def is_complete(self) -> bool:
        """Whether its prefill is done, so that only sending is left."""
        return self._commit is not None

    @property
    def due_s(self) -> float:
        """When `expire` wants to be called."""
        return min(self._deadline_s, self._repeat_s)

    @property
    def stats(self) -> TransferStats:
        """What it took so far."""
        return TransferStats(
            kv_bytes=self._kv_bytes,
            num_frames=self._num_frames,
            pack_s=self._pack_s,
            grant_wait_s=self._grant_wait_s,
            exposed_s=self._exposed_s,
            stalled_s=self._stalled_s,
        )

    def link_up(self, route: Route, now_s: float) -> None:
        """The peer's link can be used: say OPEN."""
        if self.life.advance(T.LINK_UP, now_s):
            self.route = route
            if self._num_losses:
                self._out.append(Emit(Reopened(self.spec.transfer_id, self._lost_because)))
            self._asked_since_s = now_s
            # The receiver owns this wait and answers BUSY; this deadline is the backstop.
            self._deadline_s = now_s + self._settings.grant_wait_s + 2 * self._settings.lease_s
            self._send_open(now_s)

    def granted(self, skip_tokens: int, now_s: float) -> None:
        """GRANT came: the decode node holds the first `skip_tokens` positions."""
        if not self.life.advance(T.GRANT, now_s):
            return
        self._repeat_s = float("inf")
        self._end_waits(now_s)
        if skip_tokens > self.spec.num_tokens:
            self.fault("bad_grant", f"{skip_tokens} tokens to skip of {self.spec.num_tokens}", now_s)
            return
        if self._granted_skip not in (None, skip_tokens):
            self.fault("bad_grant", f"{skip_tokens} tokens to skip, before it was {self._granted_skip}", now_s)
            return
        self._planner.skip(skip_tokens)
        self._deadline_s = now_s + self._settings.produce_wait_s
        if self._granted_skip is None:
            self._granted_skip = skip_tokens
            self._out.append(Emit(Granted(self.spec.transfer_id, skip_tokens)))
        self._commit_if_drained(now_s)

    def mark_ready(self, layers: range, tokens: range, now_s: float) -> None:
        """The node computed a range."""
        if not self.life.advance(T.READY, now_s):
            return
        if not self._planner.mark_ready(layers, tokens):
            self.fault("bad_range", f"layers {layers}, tokens {tokens} of {self.spec.num_tokens}", now_s)
        elif self.life.state is S.STREAMING and self._stalled_since_s is None:
            self._deadline_s = now_s + self._settings.produce_wait_s

    def commit(
        self, tokens: tuple[SampledToken, ...], durations_s: Mapping[str, float], asked_s: float, now_s: float
    ) -> None:
        """The node computed everything and sampled the first tokens at `asked_s`: COMMIT follows the last DATA."""
        if self.is_over or self._commit is not None:
            self.life.num_ignored += 1
            return
        self._commit = Commit(self.spec.transfer_id, self.spec.attempt, 0, tokens, dict(durations_s))
        self._commit_asked_s = asked_s
        self._planner.close()
        self._commit_if_drained(now_s)

    def peek(self) -> FrameRange | None:
        """Return the frame that could be sent next."""
        return self._planner.peek() if self.life.state is S.STREAMING else None

    def stalled(self, now_s: float) -> bool:
        """Window, socket or staging has no room; it matters if a frame is ready. Return whether the deadline moved."""
        if self._stalled_since_s is not None or self.peek() is None:
            return False
        self._stalled_since_s = now_s
        self._deadline_s = now_s + self._settings.transfer_idle_s
        return True

    def link_moved(self, now_s: float) -> bool:
        """The link took a frame, of this transfer or another: a stalled one waits its turn, which is no lack of progress.

        Return whether the deadline moved.
        """
        if self._stalled_since_s is None:
            return False
        self._deadline_s = now_s + self._settings.transfer_idle_s
        return True

    def header(self, frame: FrameRange, checksum: int) -> Data:
        """Return the header of the frame that is about to be sent."""
        return Data(
            transfer_id=self.spec.transfer_id,
            attempt=self.spec.attempt,
            sequence=self._sequence,
            layers=frame.layers,
            tokens=frame.tokens,
            dtype=self._settings.wire_layout.dtype,
            num_bytes=frame.num_bytes,
            checksum=checksum,
        )

    def sent(self, frame: FrameRange, pack_s: float, now_s: float) -> None:
        """The socket took `frame`; packing it took `pack_s`."""
        self._planner.take(frame)
        self._sequence += 1
        self._num_frames += 1
        self._kv_bytes += frame.num_bytes
        self._pack_s += pack_s
        self._end_waits(now_s)
        self._deadline_s = now_s + self._settings.produce_wait_s
        self._commit_if_drained(now_s)

    def acked(self, now_s: float) -> None:
        """ACK came. Before any COMMIT it answers something that was never said."""
        if self.life.state in (S.OPENING, S.STREAMING) and not self._was_commit_said:
            self.fault("stale_answer", "ACK before COMMIT", now_s)
        elif self.life.advance(T.ACK, now_s):
            self._exposed_s = now_s - self._commit_asked_s
            self._out.append(Emit(Acked(self.spec.transfer_id, self.stats)))
            self._close(now_s)

    def nacked(self, nack: Nack, now_s: float) -> None:
        """NACK came."""
        self._fail(T.NACK, nack.reason.label, nack.detail, now_s, busy=nack.reason is NackReason.BUSY)

    def peer_aborted(self, abort: Abort, now_s: float) -> None:
        """The decode node gave up."""
        self._fail(T.PEER_ABORT, "peer_aborted", abort.reason, now_s, busy=abort.busy)

    def gone(self, gone: Gone, now_s: float) -> None:
        """The decode node does not know the transfer, or not any more."""
        self._fail(T.GONE, f"gone_{gone.kind.name.lower()}", "", now_s)

    def link_lost(self, reason: str, now_s: float) -> None:
        """The connection that it was opened on is lost: wait for the next one, on which everything is sent again.

        The pool still holds it all, until `SendClosed`.
        """
        if self._num_losses == MAX_REOPENS:
            self._fail(T.FAULT, "peer_lost", f"{reason}; its connection broke {MAX_REOPENS + 1} times", now_s)
        elif self.life.advance(T.LINK_LOST, now_s):
            self._num_losses += 1
            self._lost_because = reason
            self._end_waits(now_s)
            self.route = None
            self._sequence = 0
            self._planner.rewind()
            self._deadline_s = now_s + self._settings.connect_wait_s
            self._repeat_s = float("inf")

    def link_failed_again(self, reason: str) -> None:
        """The link that it waits for could not be made; `reason` is told if it never can."""
        self._no_link_because = f"; last: {reason}"

    def link_refused(self, reason: str, detail: str, now_s: float) -> None:
        """There will be no link to this peer."""
        self._fail(T.LINK_REFUSED, reason, detail, now_s)

    def fault(self, reason: str, detail: str, now_s: float) -> None:
        """This side cannot go on."""
        self._give_up(T.FAULT, reason, detail, now_s)

    def abort(self, reason: str, finished: bool, busy: bool, now_s: float) -> None:
        """The node gives up, or (`finished`) has nothing to hand over, or (`busy`) has no room."""
        if self.life.advance(T.ABORT, now_s):
            self._send_abort(reason, finished, busy)
            self._close(now_s)

    def expire(self, now_s: float) -> None:
        """Its time is up, or an unanswered message is due to be said again."""
        if now_s < self._deadline_s:
            if self.life.state is S.OPENING:
                self._send_open(now_s)
            elif self.life.state is S.COMMITTED:
                self._send_commit(now_s)
            return
        story = f"{self.life.state.name.lower()} for {self.life.age_s(now_s):.1f} s"
        if self.life.state is S.WAITING:
            story += f"; lost: {self._lost_because}" if self._num_losses else ""
            story += self._no_link_because
        no_link = "peer_lost" if self._num_losses else "no_link"
        reasons = {S.WAITING: no_link, S.OPENING: "no_grant", S.STREAMING: "stalled", S.COMMITTED: "no_ack"}
        self._give_up(T.EXPIRE, reasons.get(self.life.state, "late"), story, now_s)

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

    def _commit_if_drained(self, now_s: float) -> None:
        if self._commit is None or not self._planner.is_empty or self.life.state is not S.STREAMING:
            return
        self.life.advance(T.COMMIT, now_s)
        self._deadline_s = now_s + self._settings.transfer_idle_s
        self._send_commit(now_s)

    def _send_open(self, now_s: float) -> None:
        spec = self.spec
        self._send(Open(spec.transfer_id, spec.attempt, spec.prompt_digest, spec.num_tokens))
        self._repeat_s = now_s + self._settings.lease_s

    def _send_commit(self, now_s: float) -> None:
        assert self._commit is not None
        said = self._commit
        self._was_commit_said = True
        self._send(Commit(said.transfer_id, said.attempt, self._sequence, said.tokens, said.durations_s))
        self._repeat_s = now_s + self._settings.lease_s

    def _send_abort(self, reason: str, finished: bool = False, busy: bool = False) -> None:
        if self.route is not None:
            self._send(Abort(self.spec.transfer_id, finished, reason, busy))

    def _send(self, message: Open | Commit | Abort) -> None:
        assert self.route is not None
        self._out.append(Send(self.route, message))

    def _give_up(self, trigger: SendTrigger, reason: str, detail: str, now_s: float) -> None:
        if not self.is_over:
            self._send_abort(reason)
        self._fail(trigger, reason, detail, now_s)

    def _fail(self, trigger: SendTrigger, reason: str, detail: str, now_s: float, busy: bool = False) -> None:
        if self.life.advance(trigger, now_s):
            self._out.append(Emit(SendFailed(self.spec.transfer_id, reason, detail, busy)))
            self._close(now_s)

    def _end_waits(self, now_s: float) -> None:
        """Count the time waited for a grant or for room, which ends by what was waited for or with the transfer."""
        if self._asked_since_s is not None:
            self._grant_wait_s += now_s - self._asked_since_s
        if self._stalled_since_s is not None:
            self._stalled_s += now_s - self._stalled_since_s
        self._asked_since_s = self._stalled_since_s = None

    def _close(self, now_s: float) -> None:
        self._end_waits(now_s)
        self._planner.clear()
        self._deadline_s = self._repeat_s = float("inf")
        self._out.append(Emit(SendClosed(self.spec.transfer_id, self.stats)))
