"""All links and transfers of a decode node: who may say what, who a message is for, and what is due."""

from collections import deque

from pdserve.core.ids import Incarnation, TransferId
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.codec import MAX_BEAT_IDS
from pdserve.kvtransfer.events import (
    CORRIDOR_BROKEN,
    SHUTDOWN,
    CorridorBroken,
    ReceiveClosed,
    ReceiveFailed,
    TransferSpec,
)
from pdserve.kvtransfer.instructions import Emit, Send
from pdserve.kvtransfer.memory import ParkedOpen, ParkedOpens, Tombstones
from pdserve.kvtransfer.messages import (
    Abort,
    Beat,
    Commit,
    Data,
    Gone,
    GoneKind,
    Hello,
    Message,
    Nack,
    NackReason,
    Open,
    Refuse,
)
from pdserve.kvtransfer.receive_window import ReceiveBudget
from pdserve.kvtransfer.receiver import ReceiveInstruction, ReceiveState, ReceiveTransfer
from pdserve.kvtransfer.receiver_link import ReceiverLink
from pdserve.kvtransfer.settings import LinkSettings
from pdserve.kvtransfer.timers import Timers


class ReceiverTable:
    """The sans-IO core of the receiving service. Events in, `take` the instructions out, time passed in."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._out: deque[ReceiveInstruction] = deque()
        self._peers: frozenset[Incarnation] = frozenset()
        self._links: dict[Route, ReceiverLink] = {}
        self._transfers: dict[TransferId, ReceiveTransfer] = {}
        self._timers: Timers[TransferId] = Timers()
        self._budget = ReceiveBudget(settings.base_window_bytes, settings.window_bytes, settings.receive_bytes)
        self._parked = ParkedOpens(min(settings.max_parked, MAX_BEAT_IDS), settings.park_s)
        self._tombstones = Tombstones(settings.max_tombstones, settings.tombstone_s)
        self.num_late = 0
        """Messages about transfers that are not live here."""
        self.num_strange = 0
        """Messages on connections that have no WELCOME."""
        self.num_bad_frames = 0
        self.num_wrong_peer = 0

    def take(self) -> ReceiveInstruction | None:
        """Return the next instruction."""
        return self._out.popleft() if self._out else None

    # --- the node ------------------------------------------------------------------------------------------------------

    def set_peers(self, peers: frozenset[Incarnation], now_s: float) -> None:
        """These prefill nodes may connect; a link that is no longer named goes when its transfers are over."""
        self._peers = peers
        for link in list(self._links.values()):
            # Two parked links of one peer: the later one supersedes the earlier.
            if link.is_parked and link.peer in peers:
                self._welcome(link, now_s)
            elif link.is_up:
                self._refuse_if_unnamed(link, now_s)

    def expect(self, spec: TransferSpec, now_s: float) -> None:
        """A router submitted this transfer. An id that is live already is ignored; one that is over fails at once."""
        transfer_id = spec.transfer_id
        if transfer_id in self._transfers:
            self.num_late += 1
            return
        if self._tombstones.get(transfer_id, now_s) is not None:
            self._out.append(Emit(ReceiveFailed(transfer_id, "over", "this transfer has ended before")))
            self._out.append(Emit(ReceiveClosed(transfer_id)))
            return
        transfer = self._transfers[transfer_id] = ReceiveTransfer(spec, self._settings, self._out, now_s)
        if parked := self._parked.take(transfer_id):
            link = self._links[parked.route]
            if self._is_named(transfer, link):
                transfer.opened(parked.message, parked.route, now_s, parked.came_s)
                if parked.abort is not None:
                    transfer.aborted(parked.abort, now_s)
        self._settle(transfer, now_s)

    def grant(self, transfer_id: TransferId, skip_tokens: int, now_s: float) -> None:
        """The node promises blocks."""
        if transfer := self._find(transfer_id):
            transfer.grant(skip_tokens, now_s)
            self._settle(transfer, now_s)

    def refuse(self, transfer_id: TransferId, reason: str, now_s: float) -> None:
        """The node will not take it."""
        if transfer := self._find(transfer_id):
            transfer.refuse(reason, now_s)
            self._settle(transfer, now_s)

    def cancel(self, transfer_id: TransferId, reason: str, now_s: float, busy: bool = False) -> None:
        """The node has no use for it any more, or (`busy`) no room."""
        if transfer := self._find(transfer_id):
            transfer.cancel(reason, busy, now_s)
            self._settle(transfer, now_s)

    def placed(self, transfer_id: TransferId, place_s: float) -> None:
        """The shell carried out `Place`."""
        if transfer := self._transfers.get(transfer_id):
            transfer.placed(place_s)

    def place_failed(self, transfer_id: TransferId, detail: str, now_s: float) -> None:
        """The sink raised."""
        if transfer := self._find(transfer_id):
            transfer.fault(NackReason.PLACE, detail, now_s)
            self._settle(transfer, now_s)

    # --- the network ---------------------------------------------------------------------------------------------------

    def lost(self, route: Route, reason: str, now_s: float) -> None:
        """A route is gone."""
        if link := self._links.get(route):
            self._link_lost(link, reason, now_s)

    def bad_frame(self, route: Route, detail: str, now_s: float) -> None:
        """Bytes came that are no frame. A stranger's change nothing; on a link nothing can be trusted any more."""
        self.num_bad_frames += 1
        link = self._links.get(route)
        if link is None:
            return
        if link.is_up:
            for transfer in self._on(link):
                transfer.fault(NackReason.FRAME, detail, now_s)
                self._settle(transfer, now_s)
        link.refuse(("frame",), detail, True, now_s)
        self._forget(link)

    def message(self, route: Route, message: Message, payload: memoryview, now_s: float) -> None:
        """A message came."""
        link = self._links.get(route)
        if isinstance(message, Hello):
            self._hello(route, link, message, now_s)
            return
        if link is None or not link.is_up:
            self.num_strange += 1
            if link is None and not isinstance(message, Refuse):
                # A well-formed frame: a sender whose link ended here must learn of it.
                self._out.append(Send(route, Refuse(("hello",), "say HELLO first", can_retry=True)))
            return
        link.heard(now_s)
        match message:
            case Open() | Commit() | Abort():
                self._transfer_message(link, message, now_s)
            case Data():
                self._data(link, message, payload, now_s)
                if link.is_up:
                    link.offer_window()
                self._tell_of_room()
            case Beat():
                self._beat(link, message, now_s)
            case _:
                self.num_late += 1

    # --- time ----------------------------------------------------------------------------------------------------------

    def next_due_s(self) -> float | None:
        """Return when `expire` must be called next."""
        times = [link.due_s for link in self._links.values()]
        times += [due_s for due_s in (self._timers.next_s(), self._parked.next_s()) if due_s is not None]
        soonest = min(times, default=float("inf"))
        return None if soonest == float("inf") else soonest

    def expire(self, now_s: float) -> None:
        """Do what is due by now: beat, or end."""
        for link in list(self._links.values()):
            if link.due_s <= now_s:
                reason = link.expire(self._parked.transfer_ids, now_s)
                if reason is not None:
                    self._link_lost(link, reason, now_s)
                elif link.is_over:
                    self._forget(link)
        self._parked.expire(now_s, self._never_submitted)
        for transfer_id in self._timers.take_expired(now_s):
            if transfer := self._transfers.get(transfer_id):
                transfer.expire(now_s)
                self._settle(transfer, now_s)

    def extend_leases(self, late_s: float) -> None:
        """The shell's loop was late by that much."""
        for link in self._links.values():
            link.extend_lease(late_s)

    def close(self, now_s: float, broken_by: str = "") -> None:
        """The node stops, or its I/O thread is broken: end everything by name."""
        reason, detail = (CORRIDOR_BROKEN, broken_by) if broken_by else (SHUTDOWN, "the decode node is stopping")
        for transfer in list(self._transfers.values()):
            transfer.stopped(reason, detail, now_s)
            self._settle(transfer, now_s)
        for link in list(self._links.values()):
            link.lost(reason, now_s)
            self._forget(link)
        self._parked.clear()
        if broken_by:
            self._out.append(Emit(CorridorBroken(broken_by)))

    # --- views ---------------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return gauges by name; all without `_total` go back to where they began."""
        return {
            "kv_links": len(self._links),
            "kv_links_up": sum(link.is_up for link in self._links.values()),
            "kv_transfers": len(self._transfers),
            "kv_parked_opens": len(self._parked),
            "kv_late_total": self.num_late,
            "kv_strange_total": self.num_strange,
            "kv_bad_frames_total": self.num_bad_frames,
            "kv_wrong_peer_total": self.num_wrong_peer,
        }

    def describe(self, now_s: float) -> list[dict[str, object]]:
        """Return every machine's state."""
        machines: list[ReceiverLink | ReceiveTransfer] = [*self._links.values(), *self._transfers.values()]
        return [machine.describe(now_s) for machine in machines]

    def check_invariants(self) -> None:
        """Raise AssertionError if bookkeeping contradicts itself."""
        for transfer_id, transfer in self._transfers.items():
            assert not transfer.is_over, f"an ended transfer is kept: {transfer.life.tell()}"
            assert transfer_id in self._timers, f"no deadline: {transfer.life.tell()}"
            is_linked = transfer.life.state in (ReceiveState.OPENED, ReceiveState.GRANTED)
            assert not is_linked or transfer.route in self._links, "an opened transfer without its connection"
            is_severed = transfer.life.state is ReceiveState.SEVERED
            assert not is_severed or transfer.route is None, "a severed transfer on a connection"
        assert len(self._timers) == len(self._transfers), "a deadline without a transfer"
        assert all(not link.is_over for link in self._links.values()), "a closed link is kept"
        up = [link.peer for link in self._links.values() if link.is_up]
        assert len(up) == len(set(up)), "two links from one peer"
        self._budget.check_invariants()
        num_pending = sum(not link.is_up for link in self._links.values())
        assert num_pending <= self._settings.max_parked, "too many handshakes"
        assert len(self._parked) <= self._settings.max_parked, "too many parked OPENs"
        for transfer_id in self._parked.transfer_ids:
            assert transfer_id not in self._transfers, "a live transfer is parked too"
        assert len(self._tombstones) <= self._settings.max_tombstones, "too many tombstones"

    # --- links ---------------------------------------------------------------------------------------------------------

    def _hello(self, route: Route, link: ReceiverLink | None, message: Hello, now_s: float) -> None:
        if link is None:
            link = self._links[route] = ReceiverLink(route, self._settings, self._budget, self._out, now_s)
        if link.hello(message, self._welcome_peers(), now_s):
            self._welcome(link, now_s)
        elif link.is_over:
            self._forget(link)
        else:
            self._bound_handshakes(now_s)

    def _bound_handshakes(self, now_s: float) -> None:
        """Of too many that are under way the oldest ends, so that those which go on are not kept out by some that do not.

        Those that have proved all they can, and wait to be named, rank above the others.
        """
        pending = [link for link in self._links.values() if not link.is_up]
        if len(pending) > self._settings.max_parked:
            oldest = next((link for link in pending if not link.is_parked), pending[0])
            oldest.refuse(("handshakes",), "too many are under way", True, now_s)
            self.num_strange += 1
            self._forget(oldest)

    def _welcome_peers(self) -> frozenset[Incarnation]:
        """Those that a router names, and those that it named when they began what is still under way."""
        begun = (each for each in self._transfers.values() if each.life.state is not ReceiveState.EXPECTED)
        return self._peers | {each.spec.peer for each in begun}

    def _welcome(self, link: ReceiverLink, now_s: float) -> None:
        """A peer has one link: what it opened on an earlier connection has to be opened again on this one."""
        for other in list(self._links.values()):
            if other is not link and other.peer == link.peer and not other.is_over:
                self._link_lost(other, "superseded by a new connection", now_s)
        link.welcome(now_s)

    def _link_lost(self, link: ReceiverLink, reason: str, now_s: float) -> None:
        link.lost(reason, now_s)
        self._forget(link)
        for transfer in self._on(link):
            transfer.link_lost(reason, now_s)
            self._settle(transfer, now_s)

    def _forget(self, link: ReceiverLink) -> None:
        self._links.pop(link.route, None)
        self._parked.drop_route(link.route)
        self._tell_of_room()

    def _tell_of_room(self) -> None:
        """Bytes of the budget came back: others may have waited for them."""
        if self._budget.has_room_for_others:
            for route in self._budget.told_of_room():
                self._links[route].tell_window()

    def _refuse_if_unnamed(self, link: ReceiverLink, now_s: float) -> None:
        if not link.is_up or link.peer in self._peers or self._on(link):
            return
        if link.peer not in self._welcome_peers():
            link.refuse(("peer",), "no router names this prefill node any more", True, now_s)
            self._forget(link)

    def _beat(self, link: ReceiverLink, message: Beat, now_s: float) -> None:
        for transfer_id in message.transfer_ids:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and transfer.route == link.route:
                transfer.alive(now_s)
                self._timers.set(transfer_id, transfer.due_s)

    # --- transfers -----------------------------------------------------------------------------------------------------

    def _find(self, transfer_id: TransferId) -> ReceiveTransfer | None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self.num_late += 1
        return transfer

    def _on(self, link: ReceiverLink) -> list[ReceiveTransfer]:
        return [transfer for transfer in self._transfers.values() if transfer.route == link.route]

    def _is_named(self, transfer: ReceiveTransfer, link: ReceiverLink) -> bool:
        """Whether the router named the sender of this link; if not, say so and leave the transfer alone."""
        if transfer.spec.peer == link.peer and transfer.route in (None, link.route):
            return True
        self.num_wrong_peer += 1
        detail = "the router named another sender"
        self._out.append(Send(link.route, Nack(transfer.spec.transfer_id, NackReason.PEER, detail)))
        return False

    def _transfer_message(self, link: ReceiverLink, message: Open | Commit | Abort, now_s: float) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            self._not_live(link, message, now_s)
            return
        if not self._is_named(transfer, link):
            return
        match message:
            case Open():
                transfer.opened(message, link.route, now_s)
            case Commit():
                transfer.route = link.route
                transfer.committed(message, now_s)
            case Abort():
                transfer.aborted(message, now_s)
        self._settle(transfer, now_s)

    def _data(self, link: ReceiverLink, message: Data, payload: memoryview, now_s: float) -> None:
        in_window = link.window.take(message.num_bytes)
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None:
            self._not_live(link, message, now_s)
            return
        if not self._is_named(transfer, link):
            return
        transfer.route = link.route
        if in_window:
            transfer.data(message, payload, now_s)
        else:
            transfer.fault(NackReason.WINDOW, f"{link.window.received} of {link.window.limit} bytes", now_s)
        self._settle(transfer, now_s)

    def _not_live(self, link: ReceiverLink, message: Open | Data | Commit | Abort, now_s: float) -> None:
        self.num_late += 1
        transfer_id = message.transfer_id
        grave = self._tombstones.get(transfer_id, now_s)
        if grave is not None and grave.peer == link.peer:
            grave.num_late += 1
            if isinstance(message, Open | Commit):
                self._out.append(Send(link.route, grave.answer))
            return
        match message:
            case Open() if grave is None and self._parked.park(message, link.route, now_s):
                self.num_late -= 1
            case Abort():
                parked = self._parked.get(transfer_id)
                if parked is not None and parked.route == link.route:
                    parked.abort = message
            case _:
                self._out.append(Send(link.route, Gone(transfer_id, GoneKind.UNKNOWN)))

    def _never_submitted(self, parked: ParkedOpen) -> None:
        self._out.append(Send(parked.route, Gone(parked.message.transfer_id, GoneKind.UNKNOWN)))

    def _settle(self, transfer: ReceiveTransfer, now_s: float) -> None:
        """Bring timers and tables in line with a transfer that something happened to."""
        transfer_id = transfer.spec.transfer_id
        link = self._links.get(transfer.route) if transfer.route is not None else None
        if link is not None and link.is_up:
            link.needs(transfer_id, transfer.missing_bytes)
        if not transfer.is_over:
            self._timers.set(transfer_id, transfer.due_s)
            return
        if self._transfers.pop(transfer_id, None) is None:
            return
        self._timers.clear(transfer_id)
        self._tombstones.add(transfer_id, transfer.spec.peer, transfer.answer, now_s)
        if transfer.spec.peer not in self._peers:
            for other in [each for each in self._links.values() if each.peer == transfer.spec.peer]:
                self._refuse_if_unnamed(other, now_s)
