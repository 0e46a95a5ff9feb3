"""A world of one prefill and one decode node that can be copied, compared and moved one step at a time, for exhaustive search.

Messages stay values here (the codec has its own tests). Both nodes' pools are modelled by who owns what: a decode node with one
place for KV that transfers take in turn, so that a freed place is used again at once, and a prefill node whose KV of a transfer
is poisoned when its last event came. `Broken` names what a protocol must never do; each is raised where it happens.
"""

import io
import pickle
from collections import deque
from dataclasses import dataclass, field

from pdserve.core.ids import Incarnation, TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import (
    Acked,
    FinishedEarly,
    Granted,
    Opened,
    PeerDown,
    PeerUp,
    ReceiveClosed,
    Received,
    ReceiveEvent,
    ReceiveFailed,
    Reopened,
    SendClosed,
    SendEvent,
    SendFailed,
    TransferSpec,
)
from pdserve.kvtransfer.instructions import Dial, Emit, HangUp, Place, Send, Trust
from pdserve.kvtransfer.messages import Grant, Message
from pdserve.kvtransfer.receiver_table import ReceiverTable
from pdserve.kvtransfer.sender_link import LinkState
from pdserve.kvtransfer.sender_table import SenderTable
from pdserve.kvtransfer.wire import checksum
from tests.kvtransfer.model_network import ModelNetwork
from tests.kvtransfer.model_parts import (
    FIRST,
    NUM_TOKENS,
    RECEIVER,
    SENDER,
    SHARED,
    STAGING,
    Broken,
    ModelSettings,
    Plan,
    Run,
    content,
    settings_of,
    spec_of,
)


@dataclass
class Model(ModelNetwork):
    """The state of both nodes and of everything between them. `act` moves it."""

    plans: tuple[Plan, ...]
    window_bytes: int = 1 << 20
    has_secret: bool = False
    skip_tokens: int = 0
    """How many leading tokens the decode node holds already."""
    wire_dtype: str = ""
    """The 8-bit form in which KV travels; empty: as it is."""
    holds_falsely: bool = False
    """Whether what the decode node says that it holds is another prompt's."""
    named: set[str] = field(default_factory=lambda: {SENDER, RECEIVER})
    """The sides that the router told of the other one. Those that it has not told yet, it tells by `name`."""
    now_s: float = 0.0
    num_routes: int = 0
    generations: dict[str, int] = field(default_factory=lambda: {SENDER: 0, RECEIVER: 0})
    alive: set[Route] = field(default_factory=set)
    untold: set[tuple[str, Route]] = field(default_factory=set)
    """Losses that a side has not learnt of."""
    wires: dict[tuple[str, Route], deque[tuple[Message, bytes]]] = field(default_factory=dict)
    """Messages under way, by who gets them."""
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    place: tuple[int, dict[int, bytes]] | None = None
    """The decode node's one place: which transfer owns it, and what lies in it."""
    granted_on: dict[int, Route] = field(default_factory=dict)
    """The connection on which each transfer was granted last: only its frames may be placed."""
    arriving: Route | None = None
    """The connection of the message that is being handled."""
    up: dict[str, bool] = field(default_factory=lambda: {SENDER: False, RECEIVER: False})

    def __post_init__(self) -> None:
        self.sender = SenderTable(self.settings(SENDER))
        self.receiver = ReceiverTable(self.settings(RECEIVER))
        for side in (SENDER, RECEIVER):
            for plan in self.plans:
                self.runs[side, plan.name] = Run()
        for side in sorted(self.named):
            self.name(side)
        while self.wires:
            self.deliver(*next(iter(self.wires)))

    def settings(self, side: str) -> ModelSettings:
        """Return the settings of the present run of one side."""
        return settings_of(side, self.generations[side], self.window_bytes, self.has_secret, self.wire_dtype)

    def content(self, name: int, attempt: int, token: int) -> bytes:
        """Return the KV of one token of one attempt in the form that travels."""
        return content(name, attempt, token, self.settings(SENDER).wire_layout.token_bytes)

    def name(self, side: str) -> None:
        """The router names the other node to one side."""
        self.named.add(side)
        if side == RECEIVER:
            self.receiver.set_peers(frozenset({self.settings(SENDER).incarnation}), self.now_s)
        else:
            self.sender.set_peers({self.settings(RECEIVER).incarnation: "there"}, self.now_s)
        self.execute()

    def spec(self, side: str, plan: Plan) -> TransferSpec:
        """Return a transfer as the submit to one side tells it."""
        other = RECEIVER if side == SENDER else SENDER
        attempt = plan.sent_attempt if side == SENDER else plan.expected_attempt
        peer = self.settings(other).incarnation
        return spec_of(plan.transfer_id, attempt, peer)

    # --- what nodes do ---------------------------------------------------------------------------------------------------

    def expect(self, plan: Plan) -> None:
        """A submit reaches the decode node; also a second time."""
        run = self.runs[RECEIVER, plan.name]
        run.times += not run.is_open
        self.receiver.expect(self.spec(RECEIVER, plan), self.now_s)

    def open(self, plan: Plan) -> None:
        """The prefill node announces it."""
        self.runs[SENDER, plan.name].times += 1
        self.sender.open(self.spec(SENDER, plan), self.now_s)

    def produce(self, plan: Plan) -> None:
        """Compute one more range, or commit after the last."""
        run = self.runs[SENDER, plan.name]
        if run.produced < NUM_TOKENS:
            token = run.produced
            self.sender.mark_ready(plan.transfer_id, range(1), range(token, token + 1), self.now_s)
        else:
            self.sender.commit(plan.transfer_id, FIRST, {}, self.now_s, self.now_s)
        run.produced += 1

    def abort(self, plan: Plan, finished: bool) -> None:
        """The prefill node gives up, or has nothing to hand over."""
        self.runs[SENDER, plan.name].is_aborted = True
        self.sender.abort(plan.transfer_id, "stop", finished, self.now_s)

    def grant(self, plan: Plan) -> None:
        """The decode node gives its one place away."""
        if self.place is not None:
            raise Broken("the model granted a place that is taken")
        self.runs[RECEIVER, plan.name].is_decided = True
        held = {token: self.content(plan.name, plan.expected_attempt, token) for token in range(self.skip_tokens)}
        if self.holds_falsely:
            held = dict.fromkeys(held, b"another prompt's")
        self.place = (plan.name, held)
        self.receiver.grant(plan.transfer_id, self.skip_tokens, self.now_s)

    def refuse(self, plan: Plan) -> None:
        """The decode node has no room."""
        self.runs[RECEIVER, plan.name].is_decided = True
        self.receiver.refuse(plan.transfer_id, "BUSY", self.now_s)

    def cancel(self, plan: Plan) -> None:
        """The decode node has no use for it."""
        self.runs[RECEIVER, plan.name].is_aborted = True
        self.receiver.cancel(plan.transfer_id, "cancelled", self.now_s)

    # --- the network -----------------------------------------------------------------------------------------------------

    def deliver(self, to: str, route: Route) -> None:
        """The oldest message of a way arrives."""
        message, payload = self.take(to, route)
        self.arriving = route
        if to == RECEIVER:
            self.receiver.message(route, message, memoryview(payload), self.now_s)
        else:
            self.sender.message(route, message, self.now_s)
        self.execute()

    def corrupt(self, to: str, route: Route) -> None:
        """A byte of the oldest message's payload changes; of one without payload, the frame is unreadable."""
        message, payload = self.take(to, route)
        if payload:
            self.wires.setdefault((to, route), deque()).appendleft((message, bytes([payload[0] ^ 1]) + payload[1:]))
            return
        table = self.receiver if to == RECEIVER else self.sender
        table.bad_frame(route, "damaged", self.now_s)
        self.execute()

    def tell(self, side: str, route: Route) -> None:
        """A side learns that a connection is gone: nothing comes on it after that."""
        self.untold.discard((side, route))
        self.wires.pop((side, route), None)
        table = self.sender if side == SENDER else self.receiver
        table.lost(route, "disconnected", self.now_s)
        self.execute()

    def restart(self, side: str) -> None:
        """A process dies with all it knew, and another takes its place, whom the router names to the other side."""
        for route in list(self.alive):
            self.cut(route)
        self.untold = {(other, route) for other, route in self.untold if other != side}
        self.generations[side] += 1
        self.up[side] = False
        for plan in self.plans:
            run = self.runs[side, plan.name]
            # Its pools are gone with it; what it owed, it owes no more.
            run.events += ("closed",) * (run.times - run.events.count("closed"))
            run.is_aborted = True
        if side == SENDER:
            self.sender = SenderTable(self.settings(SENDER))
        else:
            self.place = None
            self.receiver = ReceiverTable(self.settings(RECEIVER))
        for named in sorted(self.named):
            self.name(named)

    def pass_time(self) -> bool:
        """Move to the next deadline of either side; False if there is none."""
        due = [due_s for due_s in (self.sender.next_due_s(), self.receiver.next_due_s()) if due_s is not None]
        if not due:
            return False
        self.now_s = max(self.now_s, min(due))
        self.sender.expire(self.now_s)
        self.receiver.expire(self.now_s)
        self.execute()
        return True

    def redial(self) -> None:
        """The pause of a lost connection is over, and little else has happened meanwhile."""
        self.now_s = max(
            self.now_s, min(link.due_s for link in self.sender._links.values() if link.life.state is LinkState.DOWN)
        )
        self.sender.expire(self.now_s)
        self.receiver.expire(self.now_s)
        self.execute()

    # --- the shells ------------------------------------------------------------------------------------------------------

    def pump(self) -> bool:
        """The prefill node's I/O thread packs and sends one frame; False if it can send none."""
        plan = self.sender.next_data(STAGING, self.now_s)
        if plan is None:
            return False
        name = plan.transfer.spec.transfer_id[0]
        run = self.runs[SENDER, name]
        if not run.is_open:
            raise Broken(f"transfer {name} was packed from KV that its node had taken back")
        route = plan.link.route
        if route is None or len(plan.frame.tokens) != 1:
            raise Broken("the model's frames hold one token each and go on a connection")
        payload = self.content(name, plan.transfer.spec.attempt, plan.frame.tokens.start)
        self.put(RECEIVER, route, plan.transfer.header(plan.frame, checksum(payload)), payload)
        self.sender.data_sent(plan, 0.0, self.now_s)
        self.sender.data_released(plan.link, route)
        self.execute()
        return True

    def execute(self) -> None:
        """Carry out all instructions of both sides."""
        while (order := self.sender.take()) is not None:
            match order:
                case Dial(peer, _):
                    self._dial(peer)
                case Trust():
                    pass
                case HangUp(route):
                    if route in self.alive:
                        self.cut(route)
                    self.untold.discard((SENDER, route))
                case Send(route, message):
                    self.put(RECEIVER, route, message)
                case Emit():
                    self._sent(order.event)
        while (reply := self.receiver.take()) is not None:
            match reply:
                case Send():
                    if isinstance(reply.message, Grant):
                        self.granted_on[reply.message.transfer_id[0]] = reply.route
                    self.put(SENDER, reply.route, reply.message)
                case Place():
                    self._placed(reply)
                case Emit():
                    self._received(reply.event)
        self.sender.check_invariants()
        self.receiver.check_invariants()
        self._check_what_is_remembered()

    def _check_what_is_remembered(self) -> None:
        """What the tables keep although it could be computed anew agrees with that: fingerprints leave it out."""
        for transfer in self.sender._transfers.values():
            planner = transfer._planner
            if planner._is_next_known and planner._next != planner._plan():
                raise Broken(f"the next frame is remembered as {planner._next}, and is {planner._plan()}")
        for table in (self.sender, self.receiver):
            due_s = {transfer_id: transfer.due_s for transfer_id, transfer in table._transfers.items()}
            if table._timers._due != due_s:
                raise Broken(f"timers are set to {table._timers._due}, deadlines are {due_s}")

    def _dial(self, peer: Incarnation) -> None:
        self.num_routes += 1
        route = Route(f"r{self.num_routes}".encode())
        self.alive.add(route)
        self.sender.dialled(peer, route)
        self.sender.connected(route, self.now_s)

    # --- what nodes hear -------------------------------------------------------------------------------------------------

    def _note(self, side: str, transfer_id: TransferId, word: str) -> Run:
        run = self.runs[side, transfer_id[0]]
        if not run.is_open:
            raise Broken(f"{side}: {word} after the last event of transfer {transfer_id[0]}: {run.events}")
        if side == RECEIVER and "closed" in run.events and word not in ("failed:over", "closed"):
            raise Broken(f"transfer {transfer_id[0]} began again after its end: {word}")
        if word in ("granted", "opened") and word in run.events:
            raise Broken(f"{side}: the node was told twice that transfer {transfer_id[0]} was {word}")
        run.events += (word,)
        return run

    def _reopened(self, side: str, transfer_id: TransferId) -> None:
        """It asks nothing of a node, and is no part of what it knows."""
        if not self.runs[side, transfer_id[0]].is_open:
            raise Broken(f"{side}: transfer {transfer_id[0]} was opened again after its last event")

    def _sent(self, event: SendEvent) -> None:
        match event:
            case PeerUp() | PeerDown():
                self._peer(SENDER, isinstance(event, PeerUp))
            case Reopened(transfer_id):
                self._reopened(SENDER, transfer_id)
            case Granted(transfer_id):
                self._note(SENDER, transfer_id, "granted")
            case Acked(transfer_id):
                self._note(SENDER, transfer_id, "acked")
                other = self.runs[RECEIVER, transfer_id[0]]
                if "received" not in other.events and self.generations[RECEIVER] == 0:
                    raise Broken(f"transfer {transfer_id[0]} was acknowledged and never adopted")
            case SendFailed(transfer_id, reason):
                self._note(SENDER, transfer_id, f"failed:{reason}")
                is_adopted = "received" in self.runs[RECEIVER, transfer_id[0]].events
                if reason == "gone_unknown" and is_adopted:
                    raise Broken(f"the decode node forgot how transfer {transfer_id[0]} ended")
            case SendClosed(transfer_id):
                run = self._note(SENDER, transfer_id, "closed")
                if not run.is_aborted and len(run.events) < 2:
                    raise Broken(f"transfer {transfer_id[0]} ended on the sender without a reason")

    def _received(self, event: ReceiveEvent) -> None:
        match event:
            case PeerUp() | PeerDown():
                self._peer(RECEIVER, isinstance(event, PeerUp))
            case Reopened(transfer_id):
                self._reopened(RECEIVER, transfer_id)
            case Opened(transfer_id):
                self._note(RECEIVER, transfer_id, "opened").produced = 1
            case Received(transfer_id):
                self._adopted(transfer_id)
            case ReceiveFailed(transfer_id, reason):
                self._note(RECEIVER, transfer_id, f"failed:{reason}")
            case FinishedEarly(transfer_id):
                self._note(RECEIVER, transfer_id, "finished")
                if not self.runs[SENDER, transfer_id[0]].is_aborted:
                    raise Broken(f"transfer {transfer_id[0]} finished early and nobody said so")
            case ReceiveClosed(transfer_id):
                self._closed(transfer_id)

    def _adopted(self, transfer_id: TransferId) -> None:
        name = transfer_id[0]
        run = self._note(RECEIVER, transfer_id, "received")
        if run.events.count("received") > 1:
            raise Broken(f"transfer {name} was adopted twice")
        if self.place is None or self.place[0] != name:
            raise Broken(f"transfer {name} was adopted without a place")
        attempt = next(plan.expected_attempt for plan in self.plans if plan.name == name)
        wanted = {token: self.content(name, attempt, token) for token in range(NUM_TOKENS)}
        if self.place[1] != wanted:
            raise Broken(f"transfer {name} was adopted with bytes that were not sent: {self.place[1]}")
        if self.runs[SENDER, name].produced <= NUM_TOKENS:
            raise Broken(f"transfer {name} was adopted and never committed")

    def _closed(self, transfer_id: TransferId) -> None:
        run = self._note(RECEIVER, transfer_id, "closed")
        owns = self.place is not None and self.place[0] == transfer_id[0]
        if owns:
            self.place = None
        # A transfer that was granted gives its place back once, with its last event.
        if run.is_decided and run.events.count("closed") == 1 and "received" in run.events and not owns:
            raise Broken(f"transfer {transfer_id[0]} gave back a place that it did not have")

    def _placed(self, place: Place) -> None:
        name = place.transfer_id[0]
        if self.place is None or self.place[0] != name:
            raise Broken(f"bytes of transfer {name} were written into a place of {self.place}")
        if self.arriving != self.granted_on.get(name):
            raise Broken(f"a frame of another connection was taken for transfer {name}: {self.arriving!r}")
        if place.tokens.start < self.skip_tokens:
            raise Broken(f"transfer {name} was sent what is held already")
        self.place[1][place.tokens.start] = bytes(place.payload)
        self.receiver.placed(place.transfer_id, 0.0)

    def _peer(self, side: str, is_up: bool) -> None:
        # The receiver tells the loss of an old link after the new one greets, so only each side's own order counts.
        if self.up[side] is is_up and self.generations[SENDER] == self.generations[RECEIVER] == 0:
            raise Broken(f"{side}: peer {'up' if is_up else 'down'} twice")
        self.up[side] = is_up

    # --- copies ----------------------------------------------------------------------------------------------------------

    def frozen(self) -> bytes:
        """Return a copy of everything as bytes, for `thaw`."""
        out = io.BytesIO()
        pickler = pickle.Pickler(out, protocol=5)
        pickler.dispatch_table = SHARED
        pickler.dump(self)
        return out.getvalue()


def thaw(frozen: bytes) -> Model:
    """Return the model that `frozen` copied."""
    model = pickle.loads(frozen)
    assert isinstance(model, Model)
    return model
