"""All links and transfers of a prefill node: who a message is for, what is due, and which frame goes next."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.work import SampledToken
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import CORRIDOR_BROKEN, SHUTDOWN, CorridorBroken, TransferSpec
from pdserve.kvtransfer.framing import FrameRange
from pdserve.kvtransfer.instructions import Emit, HangUp
from pdserve.kvtransfer.messages import (
    Abort,
    Ack,
    Beat,
    Challenge,
    Gone,
    Grant,
    Message,
    Nack,
    Refuse,
    Welcome,
)
from pdserve.kvtransfer.sender import SendInstruction, SendState, SendTransfer
from pdserve.kvtransfer.sender_link import LinkState, SenderLink
from pdserve.kvtransfer.settings import MAX_FRAMES_IN_SOCKET, LinkSettings
from pdserve.kvtransfer.staging import StagingPool
from pdserve.kvtransfer.timers import Timers


@dataclass(frozen=True, slots=True)
class DataPlan:
    """The DATA frame to pack and send now."""

    link: SenderLink
    transfer: SendTransfer
    frame: FrameRange


class SenderTable:
    """The sans-IO core of the sending service. Events in, `take` the instructions out, time passed in."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._out: deque[SendInstruction] = deque()
        self._links: dict[Incarnation, SenderLink] = {}
        self._by_route: dict[Route, SenderLink] = {}
        self._transfers: dict[TransferId, SendTransfer] = {}
        self._timers: Timers[TransferId] = Timers()
        self._turns: deque[TransferId] = deque()
        """Transfers in the order of their turns among those still computing."""
        self._link_turn = 0
        self.num_late = 0
        """Messages about transfers and links that are not live here."""
        self.num_bad_frames = 0

    def take(self) -> SendInstruction | None:
        """Return the next instruction."""
        return self._out.popleft() if self._out else None

    # --- the node ------------------------------------------------------------------------------------------------------

    def set_peers(self, peers: Mapping[Incarnation, str], now_s: float) -> None:
        """Make links to exactly these decode nodes; a link that goes stays until its transfers are over."""
        for peer, address in peers.items():
            link = self._links.get(peer)
            if link is not None and link.address != address:
                self._remove(link, "the peer's address changed", now_s)
                link = None
            if link is None:
                link = self._links[peer] = SenderLink(peer, address, self._settings, self._out, now_s)
            link.is_retiring = False
        for peer, link in list(self._links.items()):
            if peer not in peers:
                link.is_retiring = True
                self._drop_if_unused(link, now_s)
        self._dial_due(now_s)

    def open(self, spec: TransferSpec, now_s: float) -> None:
        """Start a transfer. An id that is live already is ignored."""
        if spec.transfer_id in self._transfers:
            self.num_late += 1
            return
        transfer = SendTransfer(spec, self._settings, self._out, now_s)
        self._transfers[spec.transfer_id] = transfer
        self._turns.append(spec.transfer_id)
        link = self._links.get(spec.peer)
        if link is not None and link.life.state is LinkState.REFUSED:
            transfer.link_refused("peer_refused", ", ".join(link.refused_fields), now_s)
        elif link is not None and link.is_up and link.route is not None:
            transfer.link_up(link.route, now_s)
        self._settle(transfer, now_s)

    def mark_ready(self, transfer_id: TransferId, layers: range, tokens: range, now_s: float) -> None:
        """A range was computed."""
        if transfer := self._find(transfer_id):
            transfer.mark_ready(layers, tokens, now_s)
            self._settle(transfer, now_s)

    def commit(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        durations_s: Mapping[str, float],
        asked_s: float,
        now_s: float,
    ) -> None:
        """Everything was computed; the node asked at `asked_s`."""
        if transfer := self._find(transfer_id):
            transfer.commit(tokens, durations_s, asked_s, now_s)
            self._settle(transfer, now_s)

    def abort(self, transfer_id: TransferId, reason: str, finished: bool, now_s: float, busy: bool = False) -> None:
        """The node gives up."""
        if transfer := self._find(transfer_id):
            transfer.abort(reason, finished, busy, now_s)
            self._settle(transfer, now_s)

    def fault(self, transfer_id: TransferId, reason: str, detail: str, now_s: float) -> None:
        """A transfer cannot go on because of this side."""
        if transfer := self._find(transfer_id):
            transfer.fault(reason, detail, now_s)
            self._settle(transfer, now_s)

    # --- the network ---------------------------------------------------------------------------------------------------

    def dialled(self, peer: Incarnation, route: Route) -> None:
        """The shell carried out `Dial`."""
        link = self._links.get(peer)
        if link is None:
            self._out.append(HangUp(route))
            return
        link.dialled(route)
        self._by_route[route] = link

    def connected(self, route: Route, now_s: float) -> None:
        """A dialled route stands."""
        if link := self._by_route.get(route):
            link.connected(now_s)

    def lost(self, route: Route, reason: str, now_s: float) -> None:
        """A route is gone."""
        if link := self._by_route.get(route):
            self._link_lost(link, reason, now_s)

    def bad_frame(self, route: Route, detail: str, now_s: float) -> None:
        """Bytes came that are no frame: nothing on this connection can be trusted any more."""
        self.num_bad_frames += 1
        self.lost(route, f"damaged frame: {detail}", now_s)

    def message(self, route: Route, message: Message, now_s: float) -> None:
        """A message came."""
        link = self._by_route.get(route)
        if link is None:
            self.num_late += 1
            return
        link.heard(now_s)
        match message:
            case Welcome():
                if link.welcomed(message, now_s):
                    self._link_is_up(link, route, now_s)
                self._fail_if_refused(link, now_s)
            case Challenge():
                link.challenged(message, now_s)
                self._fail_if_refused(link, now_s)
            case Refuse():
                reason = link.refused(message, now_s)
                if reason is not None:
                    self._link_lost(link, reason, now_s)
                self._fail_if_refused(link, now_s)
            case Beat():
                link.beat(message)
            case Grant() | Ack() | Nack() | Abort() | Gone():
                self._transfer_message(link, message, now_s)
            case _:
                self.num_late += 1

    # --- time ----------------------------------------------------------------------------------------------------------

    def next_due_s(self) -> float | None:
        """Return when `expire` must be called next."""
        times = [link.due_s for link in self._links.values()]
        if (transfer_s := self._timers.next_s()) is not None:
            times.append(transfer_s)
        soonest = min(times, default=float("inf"))
        return None if soonest == float("inf") else soonest

    def expire(self, now_s: float) -> None:
        """Do what is due by now: dial, beat, repeat, or end."""
        self._dial_due(now_s)
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
        reason, detail = (CORRIDOR_BROKEN, broken_by) if broken_by else (SHUTDOWN, "the prefill node is stopping")
        for transfer in list(self._transfers.values()):
            transfer.fault(reason, detail, now_s)
            self._settle(transfer, now_s)
        for link in list(self._links.values()):
            self._remove(link, reason, now_s)
        if broken_by:
            self._out.append(Emit(CorridorBroken(broken_by)))

    # --- data ----------------------------------------------------------------------------------------------------------

    def next_data(self, staging: StagingPool, now_s: float) -> DataPlan | None:
        """Choose the next frame, or None if nothing can be sent.

        Links take turns, those that `staging` has a buffer for. On a link, transfers whose prefill is complete go first, oldest
        first; the others take turns.
        """
        candidates = self._heads()
        links = list(candidates)
        with_room = [
            link.route
            for link, (_, frame) in candidates.items()
            if link.route is not None and link.has_room(frame.num_bytes)
        ]
        takers = staging.takers(with_room, now_s) if with_room else []
        for offset in range(len(links)):
            link = links[(self._link_turn + offset) % len(links)]
            transfer, frame = candidates[link]
            if link.route not in takers:
                for waiting in self._on(link):
                    if waiting.stalled(now_s):
                        self._settle(waiting, now_s)
                continue
            self._link_turn = (self._link_turn + offset + 1) % len(links)
            return DataPlan(link, transfer, frame)
        return None

    def data_sent(self, plan: DataPlan, pack_s: float, now_s: float) -> None:
        """The socket took the planned frame; `data_released` follows when it let go of the buffer."""
        plan.link.sent_bytes += plan.frame.num_bytes
        plan.link.num_in_socket += 1
        for waiting in self._on(plan.link):
            if waiting.link_moved(now_s):
                self._settle(waiting, now_s)
        plan.transfer.sent(plan.frame, pack_s, now_s)
        transfer_id = plan.transfer.spec.transfer_id
        self._turns.remove(transfer_id)
        self._turns.append(transfer_id)
        self._settle(plan.transfer, now_s)

    def data_released(self, link: SenderLink, route: Route) -> None:
        """The socket of `route` let go of one frame; a route that is gone took its count along."""
        if link.route == route:
            link.num_in_socket -= 1

    # --- views ---------------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return gauges by name; all without `_total` go back to where they began."""
        return {
            "kv_links": len(self._links),
            "kv_links_up": sum(link.is_up for link in self._links.values()),
            "kv_transfers": len(self._transfers),
            "kv_frames_in_sockets": sum(link.num_in_socket for link in self._links.values()),
            "kv_late_total": self.num_late,
            "kv_bad_frames_total": self.num_bad_frames,
        }

    def describe(self, now_s: float) -> list[dict[str, object]]:
        """Return every machine's state."""
        machines: Iterable[SenderLink | SendTransfer] = [*self._links.values(), *self._transfers.values()]
        return [machine.describe(now_s) for machine in machines]

    def check_invariants(self) -> None:
        """Raise AssertionError if bookkeeping contradicts itself."""
        assert set(self._turns) == self._transfers.keys(), "turns and transfers differ"
        assert len(self._turns) == len(self._transfers), "a transfer has two turns"
        for transfer_id, transfer in self._transfers.items():
            assert not transfer.is_over, f"an ended transfer is kept: {transfer.life.tell()}"
            assert transfer_id in self._timers, f"no deadline: {transfer.life.tell()}"
        assert len(self._timers) == len(self._transfers), "a deadline without a transfer"
        for route, link in self._by_route.items():
            assert link.route == route, "a route leads to a link that has another"
        for link in self._links.values():
            assert link.sent_bytes <= link.window_limit, "the window was exceeded"
            assert 0 <= link.num_in_socket <= MAX_FRAMES_IN_SOCKET, "too many frames inside a socket"
            assert not link.life.is_terminal, "a closed link is kept"

    # --- inside --------------------------------------------------------------------------------------------------------

    def _find(self, transfer_id: TransferId) -> SendTransfer | None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            self.num_late += 1
        return transfer

    def _heads(self) -> dict[SenderLink, tuple[SendTransfer, FrameRange]]:
        """Return, for each link, the transfer whose turn it is and its next frame."""
        heads: dict[SenderLink, tuple[SendTransfer, FrameRange]] = {}
        for transfer_id in self._turns:
            transfer = self._transfers[transfer_id]
            link = self._links.get(transfer.spec.peer)
            frame = transfer.peek()
            if frame is None or link is None:
                continue
            other = heads.get(link)
            if other is None or self._goes_before(transfer, other[0]):
                heads[link] = (transfer, frame)
        return heads

    @staticmethod
    def _goes_before(transfer: SendTransfer, other: SendTransfer) -> bool:
        if not transfer.is_complete:
            return False
        return not other.is_complete or transfer.spec.arrived_s < other.spec.arrived_s

    def _transfer_message(self, link: SenderLink, message: Grant | Ack | Nack | Abort | Gone, now_s: float) -> None:
        transfer = self._transfers.get(message.transfer_id)
        if transfer is None or transfer.spec.peer != link.peer:
            self.num_late += 1
            return
        match message:
            case Grant():
                transfer.granted(message.skip_tokens, now_s)
            case Ack():
                transfer.acked(now_s)
            case Nack():
                transfer.nacked(message, now_s)
            case Abort():
                transfer.peer_aborted(message, now_s)
            case Gone():
                transfer.gone(message, now_s)
        self._settle(transfer, now_s)

    def _settle(self, transfer: SendTransfer, now_s: float) -> None:
        """Bring timers and tables in line with a transfer that something happened to."""
        transfer_id = transfer.spec.transfer_id
        if not transfer.is_over:
            self._timers.set(transfer_id, transfer.due_s)
            return
        if self._transfers.pop(transfer_id, None) is None:
            return
        self._turns.remove(transfer_id)
        self._timers.clear(transfer_id)
        link = self._links.get(transfer.spec.peer)
        if link is not None:
            self._drop_if_unused(link, now_s)

    def _dial_due(self, now_s: float) -> None:
        for link in list(self._links.values()):
            if link.due_s > now_s:
                continue
            ids = tuple(t.spec.transfer_id for t in self._on(link)) if link.is_up else ()
            reason = link.expire(ids, now_s)
            if reason is not None:
                self._link_lost(link, reason, now_s)

    def _on(self, link: SenderLink) -> list[SendTransfer]:
        return [transfer for transfer in self._transfers.values() if transfer.spec.peer == link.peer]

    def _link_is_up(self, link: SenderLink, route: Route, now_s: float) -> None:
        for transfer in self._on(link):
            transfer.link_up(route, now_s)
            self._settle(transfer, now_s)

    def _link_lost(self, link: SenderLink, reason: str, now_s: float) -> None:
        if link.route is not None:
            self._by_route.pop(link.route, None)
        # ABORTs would follow the hang-up, so the peer learns of the loss from the connection itself.
        link.lost(reason, now_s)
        for transfer in self._on(link):
            if transfer.life.state is SendState.WAITING:
                transfer.link_failed_again(reason)
            else:
                transfer.link_lost(reason, now_s)
                self._settle(transfer, now_s)

    def _fail_if_refused(self, link: SenderLink, now_s: float) -> None:
        if link.life.state is not LinkState.REFUSED:
            return
        self._by_route = {route: other for route, other in self._by_route.items() if other is not link}
        for transfer in self._on(link):
            transfer.link_refused("peer_refused", ", ".join(link.refused_fields), now_s)
            self._settle(transfer, now_s)

    def _drop_if_unused(self, link: SenderLink, now_s: float) -> None:
        if link.is_retiring and not self._on(link):
            self._remove(link, "dropped", now_s)

    def _remove(self, link: SenderLink, reason: str, now_s: float) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        if link.route is not None:
            self._by_route.pop(link.route, None)
        link.drop(reason, now_s)
        for transfer in self._on(link):
            if transfer.life.state is not SendState.WAITING:
                transfer.link_lost(reason, now_s)
                self._settle(transfer, now_s)
