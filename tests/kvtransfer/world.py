"""Both machines' tables joined by a wire that a test controls, with time that stands still. No threads, no sockets.

Every message passes the codec. A test may look at the wire, and change, drop or repeat the k-th frame that a side sends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from pdserve.core.clock import ManualClock
from pdserve.core.ids import Incarnation, TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.codec import decode, encode
from pdserve.kvtransfer.events import (
    PeerDown,
    PeerUp,
    ReceiveEvent,
    ReceiveFailed,
    SendEvent,
    SendFailed,
    TransferSpec,
)
from pdserve.kvtransfer.instructions import Dial, Emit, HangUp, Place, Send, Trust
from pdserve.kvtransfer.messages import Message
from pdserve.kvtransfer.receiver_table import ReceiverTable
from pdserve.kvtransfer.sender_table import SenderTable
from pdserve.kvtransfer.settings import LinkSettings
from pdserve.kvtransfer.staging import StagingPool
from pdserve.kvtransfer.wire import FrameError, checksum
from tests.kvtransfer.nodes import FIRST, BytesSink, BytesSource, settings, spec_for

Frames = tuple[bytes, ...]


class World:
    """One prefill node and one decode node."""

    def __init__(self, mine: LinkSettings | None = None, theirs: LinkSettings | None = None) -> None:
        self.mine, self.theirs = mine or settings(), theirs or settings()
        self.sender, self.receiver = SenderTable(self.mine), ReceiverTable(self.theirs)
        self.source, self.sink = BytesSource(self.mine.layout), BytesSink(self.theirs.layout)
        self.clock = ManualClock()
        self.sent: list[SendEvent] = []
        self.received: list[ReceiveEvent] = []
        self.wire: deque[tuple[bool, Route, Frames]] = deque()
        """Messages under way: whether towards the receiver, the route, the frames."""
        self.log: list[tuple[str, Message]] = []
        """Every message that was handed to the wire, with its way (`>` to the receiver, `<` back)."""
        self.alive: set[Route] = set()
        self.num_dialled = 0
        self.answers = True
        """Whether somebody listens."""
        self.fault: Callable[[bool, int, Message, Frames], list[Frames]] = lambda *args: [args[3]]
        self.num_on_wire = 0
        self.staging = StagingPool(16, 1 << 20)
        """All free, unless a test leases some."""
        self.sends_data = True
        self.release_at_once = True
        self.unreleased: list[Callable[[], None]] = []

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    # --- the shell -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Run until nothing moves any more without time passing."""
        self._execute()
        while self.wire or self._send_data():
            self._execute()
            if self.wire:
                self._deliver()
            self._execute()
        self.sender.check_invariants()
        self.receiver.check_invariants()

    def advance(self, seconds: float, step_s: float = 0.25) -> None:
        """Let time pass in steps, everything settling in between."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.clock.advance(min(step_s, end_s - self.now_s))
            self.settle()
            self.sender.expire(self.now_s)
            self.receiver.expire(self.now_s)
            self.settle()

    def cut(self, tell_sender: bool = True, tell_receiver: bool = True) -> None:
        """The connection breaks; what is under way is lost."""
        self.wire.clear()
        for route in list(self.alive):
            self.alive.discard(route)
            if tell_sender:
                self.sender.lost(route, "disconnected", self.now_s)
            if tell_receiver:
                self.receiver.lost(route, "disconnected", self.now_s)
        self.settle()

    # --- what nodes do ---------------------------------------------------------------------------------------------------

    def meet(self) -> "World":
        """Both nodes learn of each other from the router."""
        self.receiver.set_peers(frozenset({self.mine.incarnation}), self.now_s)
        self.sender.set_peers({self.theirs.incarnation: "there"}, self.now_s)
        self.settle()
        return self

    def specs(self, num_tokens: int = 20, arrived_s: float = 0.0) -> tuple[TransferSpec, TransferSpec]:
        """One transfer as both nodes' submits describe it."""
        mine = spec_for(self.theirs.incarnation, num_tokens, arrived_s)
        return mine, replace(mine, peer=self.mine.incarnation)

    def open(self, num_tokens: int = 20, grant: bool = True, skip_tokens: int = 0) -> TransferId:
        """Expect and open, and grant unless told otherwise."""
        mine, theirs = self.specs(num_tokens)
        self.receiver.expect(theirs, self.now_s)
        self.sender.open(mine, self.now_s)
        self.settle()
        if grant:
            self.receiver.grant(mine.transfer_id, skip_tokens, self.now_s)
            self.settle()
        return mine.transfer_id

    def mark(self, transfer_id: TransferId, layers: range, tokens: range) -> None:
        """A range is computed."""
        self.sender.mark_ready(transfer_id, layers, tokens, self.now_s)
        self.settle()

    def commit(self, transfer_id: TransferId) -> None:
        """Everything is computed."""
        self.sender.commit(transfer_id, FIRST, {}, self.now_s, self.now_s)
        self.settle()

    def send_all(self, transfer_id: TransferId, num_tokens: int = 20) -> None:
        """Mark layer by layer in two chunks, and commit."""
        half = num_tokens // 2
        for tokens in (range(half), range(half, num_tokens)):
            for layer in range(self.mine.layout.num_layers):
                self.mark(transfer_id, range(layer, layer + 1), tokens)
        self.commit(transfer_id)

    # --- what tests ask --------------------------------------------------------------------------------------------------

    def sent_kinds(self, transfer_id: TransferId) -> list[str]:
        """Names of the sender's events of one transfer."""
        return [type(e).__name__ for e in self.sent if getattr(e, "transfer_id", None) == transfer_id]

    def received_kinds(self, transfer_id: TransferId) -> list[str]:
        """Names of the receiver's events of one transfer."""
        return [type(e).__name__ for e in self.received if getattr(e, "transfer_id", None) == transfer_id]

    def said(self, way: str, kind: type) -> list[Message]:
        """Messages of one kind that went one way."""
        return [message for direction, message in self.log if direction == way and isinstance(message, kind)]

    def assert_nothing_left(self) -> None:
        """No transfer, no parked OPEN, no frame in a socket."""
        left = {**self.sender.gauges(), **self.receiver.gauges()}
        names = ("kv_transfers", "kv_parked_opens", "kv_frames_in_sockets")
        assert {name: left[name] for name in names} == dict.fromkeys(names, 0)
        assert self.sender.gauges()["kv_transfers"] == 0

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _execute(self) -> None:
        while (order := self.sender.take()) is not None:
            match order:
                case Dial(peer, _):
                    self.num_dialled += 1
                    route = Route(f"r{self.num_dialled}".encode())
                    self.sender.dialled(peer, route)
                    if self.answers:
                        self.alive.add(route)
                        self.sender.connected(route, self.now_s)
                    else:
                        self.sender.lost(route, "nobody listens", self.now_s)
                case Trust():
                    pass
                case HangUp(route):
                    if route in self.alive:
                        self.alive.discard(route)
                        self.receiver.lost(route, "disconnected", self.now_s)
                case Send(route, message):
                    self._put(True, route, message, b"")
                case Emit():
                    self.sent.append(order.event)
        while (reply := self.receiver.take()) is not None:
            match reply:
                case Send():
                    self._put(False, reply.route, reply.message, b"")
                case Place():
                    self._place(reply)
                case Emit():
                    self.received.append(reply.event)

    def _place(self, place: Place) -> None:
        try:
            self.sink.place(place.transfer_id, place.layers, place.tokens, place.payload)
        except OSError as error:
            self.receiver.place_failed(place.transfer_id, str(error), self.now_s)
        else:
            self.receiver.placed(place.transfer_id, 0.0)

    def _put(self, towards_receiver: bool, route: Route, message: Message, payload: bytes) -> None:
        self.log.append((">" if towards_receiver else "<", message))
        frames: Frames = (encode(message), payload) if payload else (encode(message),)
        for changed in self.fault(towards_receiver, self.num_on_wire, message, frames):
            self.wire.append((towards_receiver, route, changed))
        self.num_on_wire += 1

    def _deliver(self) -> None:
        towards_receiver, route, frames = self.wire.popleft()
        if route not in self.alive:
            return
        try:
            message, payload = decode(frames)
        except FrameError as error:
            (self.receiver if towards_receiver else self.sender).bad_frame(route, str(error), self.now_s)
            return
        if towards_receiver:
            self.receiver.message(route, message, payload, self.now_s)
        else:
            self.sender.message(route, message, self.now_s)

    def _send_data(self) -> bool:
        if not self.sends_data:
            return False
        plan = self.sender.next_data(self.staging, self.now_s)
        if plan is None:
            return False
        route, spec, frame = plan.link.route, plan.transfer.spec, plan.frame
        assert route is not None
        payload = bytearray(frame.num_bytes)
        try:
            self.source.pack(spec.transfer_id, frame.layers, frame.tokens, memoryview(payload))
        except OSError as error:
            self.sender.fault(spec.transfer_id, "pack_failed", str(error), self.now_s)
            return True
        header = plan.transfer.header(frame, checksum(payload))
        self._put(True, route, header, bytes(payload))
        self.sender.data_sent(plan, 0.0, self.now_s)
        if self.release_at_once:
            self.sender.data_released(plan.link, route)
        else:
            self.unreleased.append(lambda: self.sender.data_released(plan.link, route))
        return True


def peers_up(events: Sequence[SendEvent | ReceiveEvent]) -> set[Incarnation]:
    """The peers that a node takes for connected after these events."""
    up: set[Incarnation] = set()
    for event in events:
        if isinstance(event, PeerUp):
            up.add(event.incarnation)
        elif isinstance(event, PeerDown):
            up.remove(event.incarnation)
    return up


def failure(world: World, transfer_id: TransferId) -> str:
    """Why the sender's transfer failed."""
    return next(e.reason for e in world.sent if isinstance(e, SendFailed) and e.transfer_id == transfer_id)


def loss(world: World, transfer_id: TransferId) -> str:
    """Why the receiver's transfer failed."""
    return next(e.reason for e in world.received if isinstance(e, ReceiveFailed) and e.transfer_id == transfer_id)
