"""Both services' shells with real frames, channels, staging and decorators, moved turn by turn, with time passed in."""

from collections.abc import Callable
from dataclasses import replace

from pdserve.core.clock import ManualClock
from pdserve.core.ids import TransferId
from pdserve.core.link_faults import LinkFaults
from pdserve.core.link_shape import LinkShape
from pdserve.kvtransfer.events import (
    Acked,
    Opened,
    ReceiveClosed,
    Received,
    ReceiveEvent,
    SendClosed,
    SendEvent,
    TransferSpec,
)
from pdserve.kvtransfer.faults import FaultPlan, FaultyChannel
from pdserve.kvtransfer.inprocess import InProcessNetwork
from pdserve.kvtransfer.receive_service import _ReceiveShell
from pdserve.kvtransfer.send_service import _SendShell
from pdserve.kvtransfer.settings import LinkSettings
from pdserve.kvtransfer.shaping import ShapedChannel
from tests.kvtransfer.nodes import FIRST, BytesSink, BytesSource, settings, spec_for

Shell = _SendShell | _ReceiveShell
NUM_TOKENS = 20
MOST_TURNS = 20_000


class BoundSink(BytesSink):
    """A decode node's pool that may be written for a transfer only between its grant and its last event."""

    def __init__(self, mine: LinkSettings) -> None:
        super().__init__(mine.layout)
        self.bound: set[TransferId] = set()
        self.strays: list[TransferId] = []

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        if transfer_id not in self.bound:
            self.strays.append(transfer_id)
        super().place(transfer_id, layers, tokens, payload)

    def free(self, transfer_id: TransferId) -> None:
        """The last event came: the blocks go, poisoned, to whoever wants them."""
        self.bound.discard(transfer_id)
        self.placed.pop(transfer_id, None)


class BoundSource(BytesSource):
    """A prefill node's pool that may be read for a transfer only until its last event."""

    def __init__(self, mine: LinkSettings) -> None:
        super().__init__(mine.layout)
        self.over: set[TransferId] = set()
        self.strays: list[TransferId] = []

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        if transfer_id in self.over:
            self.strays.append(transfer_id)
        super().pack(transfer_id, layers, tokens, into)


class SteppedPair:
    """One prefill and one decode node, and the link between them."""

    def __init__(self, faults: LinkFaults, back: LinkFaults, shape: LinkShape | None = None) -> None:
        self.clock, network = ManualClock(), InProcessNetwork()
        self.mine, self.theirs = (
            settings(
                produce_wait_s=20.0, open_wait_s=20.0, grant_wait_s=5.0, window_bytes=1 << 20, staging_bytes=2 << 20
            )
            for _ in range(2)
        )
        self.source, self.sink = BoundSource(self.mine), BoundSink(self.theirs)
        self.sent: list[SendEvent] = []
        self.received: list[ReceiveEvent] = []
        self.wrong: list[str] = []
        """Adoptions with other bytes than were sent. A handler's own exceptions are logged by the service, and go no further."""
        self.will_grant: Callable[[TransferId], bool] = lambda _: True
        self.sender = _SendShell(self.mine, self.source, self._on_sent, self.clock)
        self.receiver = _ReceiveShell(self.theirs, self.sink, self._on_received, "there", 0, self.clock)
        self.channels = [self._channel(network, which, shape) for which in (faults, back)]
        for shell, channel in zip(self.shells, self.channels, strict=True):
            shell.begin(channel)
        self.receiver.table.set_peers(frozenset({self.mine.incarnation}), 0.0)
        self.sender.table.set_peers({self.theirs.incarnation: self.receiver.address}, 0.0)
        self.settle()

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    @property
    def shells(self) -> tuple[Shell, Shell]:
        return self.sender, self.receiver

    # --- what nodes do ---------------------------------------------------------------------------------------------------

    def specs(self) -> tuple[TransferSpec, TransferSpec]:
        """One transfer as both nodes' submits describe it."""
        mine = spec_for(self.theirs.incarnation, NUM_TOKENS, self.now_s)
        return mine, replace(mine, peer=self.mine.incarnation)

    def start(self) -> TransferId:
        """Both nodes are told of a transfer."""
        mine, theirs = self.specs()
        self.receiver.table.expect(theirs, self.now_s)
        self.sender.table.open(mine, self.now_s)
        return mine.transfer_id

    def produce(self, transfer_id: TransferId, tokens: range) -> None:
        """All layers of some tokens are computed, layer by layer."""
        for layer in range(self.mine.layout.num_layers):
            self.sender.table.mark_ready(transfer_id, range(layer, layer + 1), tokens, self.now_s)

    def commit(self, transfer_id: TransferId) -> None:
        """Everything is computed."""
        self.sender.table.commit(transfer_id, FIRST, {}, self.now_s, self.now_s)

    def whole(self) -> TransferId:
        """Start a transfer, produce everything and commit."""
        transfer_id = self.start()
        self.produce(transfer_id, range(NUM_TOKENS // 2))
        self.produce(transfer_id, range(NUM_TOKENS // 2, NUM_TOKENS))
        self.commit(transfer_id)
        return transfer_id

    def end_faults(self) -> None:
        """From here on the link does what it should."""
        for channel in self.channels:
            channel._plan = FaultPlan(LinkFaults())

    # --- turns -----------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take turns until nothing moves without time passing."""
        num_quiet = 0
        for _ in range(MOST_TURNS):
            moved = [self._turn(shell, channel) for shell, channel in zip(self.shells, self.channels, strict=True)]
            for shell in self.shells:
                shell.table.check_invariants()
            # What the last turn sent without having been moved itself arrives in the next one.
            num_quiet = 0 if any(moved) else num_quiet + 1
            if num_quiet == 2:
                return
        raise AssertionError("it never comes to rest: somebody polls")

    def end(self, within_s: float) -> None:
        """Let time pass until every transfer is over and nothing is under way; fail by name if that takes too long."""
        self.advance(within_s, is_over=lambda: not self.under_way())
        assert not self.under_way(), self.under_way()

    def reconnect(self, within_s: float) -> None:
        """Let time pass until both sides take the link for up; fail by name if that takes too long."""

        def is_up() -> bool:
            return all(shell.table.gauges()["kv_links_up"] == 1 for shell in self.shells)

        self.advance(within_s, is_over=is_up)
        assert is_up(), [shell.table.describe(self.now_s) for shell in self.shells]

    def under_way(self) -> list[object]:
        """What is not over."""
        held = [channel.gauges()["kv_held_frames"] for channel in self.channels]
        transfers = [each for shell in self.shells for each in shell.table.describe(self.now_s) if "transfer" in each]
        return [*transfers, *(number for number in held if number), *self.receiver.table._parked.transfer_ids]

    def advance(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, from deadline to deadline, until `is_over`."""
        end_s = self.now_s + seconds
        for _ in range(MOST_TURNS):
            self.settle()
            if is_over():
                return
            due = [due for each in (*self.shells, *self.channels) if (due := each.next_due_s()) is not None]
            next_s = min([end_s, *due])
            if next_s >= end_s:
                break
            self.clock.advance(max(0.0, next_s - self.now_s))
        self.clock.advance(max(0.0, end_s - self.now_s))
        self.settle()

    def check(self) -> None:
        """Nothing is left, nobody touched what was not his, and nobody was told twice."""
        for shell in self.shells:
            shell.table.check_invariants()
            gauges = shell.table.gauges()
            left = {name: gauges.get(name, 0) for name in ("kv_transfers", "kv_frames_in_sockets", "kv_parked_opens")}
            assert not any(left.values()), left
        assert self.sender.staging.leased_bytes == 0
        assert [channel.gauges()["kv_held_frames"] for channel in self.channels] == [0, 0]
        assert self.wrong == [], "adopted with bytes that were not sent"
        assert self.sink.strays == []
        assert self.source.strays == []
        assert self.sink.bound == set()
        for events, last in ((self.sent, SendClosed), (self.received, ReceiveClosed)):
            of: dict[TransferId, list[object]] = {}
            for event in events:
                if (transfer_id := getattr(event, "transfer_id", None)) is not None:
                    of.setdefault(transfer_id, []).append(event)
            for each in of.values():
                assert [isinstance(event, last) for event in each] == [False] * (len(each) - 1) + [True], each
        acked = {event.transfer_id for event in self.sent if isinstance(event, Acked)}
        adopted = {event.transfer_id for event in self.received if isinstance(event, Received)}
        assert acked <= adopted, "ACK without adoption"

    # --- inside ----------------------------------------------------------------------------------------------------------

    def _channel(self, network: InProcessNetwork, faults: LinkFaults, shape: LinkShape | None) -> FaultyChannel:
        inner = network.channel()
        shaped = inner if shape is None else ShapedChannel(inner, shape, self.clock)
        return FaultyChannel(shaped, faults, self.clock)

    def _turn(self, shell: Shell, channel: FaultyChannel) -> bool:
        events = channel.poll(0.0)
        for event in events:
            shell.handle(event, self.now_s)
            shell.carry_out(self.now_s)
        due_s = shell.next_due_s()
        is_due = due_s is not None and due_s <= self.now_s
        shell.expire(self.now_s)
        shell.carry_out(self.now_s)
        has_worked = shell.work(self.now_s)
        shell.carry_out(self.now_s)
        return bool(events) or is_due or has_worked

    def _on_sent(self, event: SendEvent) -> None:
        self.sent.append(event)
        if isinstance(event, SendClosed):
            self.source.over.add(event.transfer_id)

    def _on_received(self, event: ReceiveEvent) -> None:
        self.received.append(event)
        match event:
            case Opened(transfer_id) if self.will_grant(transfer_id):
                self.sink.bound.add(transfer_id)
                self.receiver.table.grant(transfer_id, 0, self.now_s)
            case Received(transfer_id):
                try:
                    self.sink.check(transfer_id, NUM_TOKENS)
                except (AssertionError, KeyError) as error:
                    self.wrong.append(f"{transfer_id.hex()}: {error!r}")
            case ReceiveClosed(transfer_id):
                self.sink.free(transfer_id)
