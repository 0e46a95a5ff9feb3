"""What others need not wait for while the I/O thread works, and the lock that lets them in."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from pdserve.core.errors import InternalError
from pdserve.core.ids import TransferId
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.kvtransfer import KvReceiveService, KvSendService, Opened, ReceiveClosed, SendClosed
from pdserve.kvtransfer.fair_lock import FairLock
from pdserve.kvtransfer.inprocess import InProcessNetwork
from tests.kvtransfer.nodes import WAIT_S, BytesSource, Events, Pair, settings, spec_for, wait_until

ROW = KvLayout((LayerLayout(4, 64, 64),) * 12, "float32")
"""2 KiB per token and layer: 512 tokens of one layer fill a frame."""
SHORT_S = 5.0
"""How long the I/O thread is held up at most, when the thing under test is broken."""


class HeldSource(BytesSource):
    """A pool whose `during` is called amid each frame that is packed."""

    def __init__(self, layout: KvLayout) -> None:
        super().__init__(layout)
        self.during: Callable[[int], None] = lambda num: None

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        super().pack(transfer_id, layers, tokens, into)
        self.during(len(self.packed))


class TestLookingIn:
    """Readers wait for nothing (gauges) or for one frame (describe), however much there is to send."""

    def make(self) -> tuple[Pair, HeldSource]:
        pair = Pair.make(InProcessNetwork().channel, settings(layout=ROW), settings(layout=ROW))
        network = InProcessNetwork()
        source = HeldSource(ROW)
        pair.source = source
        pair.sender = KvSendService(pair.sender_settings, source, pair.sent, make_channel=network.channel)
        pair.receiver = KvReceiveService(pair.receiver_settings, pair.sink, pair.received, make_channel=network.channel)
        return pair.start(), source

    def test_gauges_do_not_wait_for_the_frame_that_is_packed(self) -> None:
        pair, source = self.make()
        packing, seen, waited = threading.Event(), threading.Event(), list[bool]()

        def hold(num: int) -> None:
            if num == 1:
                packing.set()
                waited.append(seen.wait(SHORT_S))

        source.during = hold
        transfer_id = pair.open(512)
        pair.send_all(transfer_id, 512)
        assert packing.wait(WAIT_S)
        assert pair.sender.gauges()["kv_transfers"] == 1
        seen.set()
        pair.closed(transfer_id)
        assert waited == [True]
        pair.stop()

    def test_others_come_in_between_two_frames(self) -> None:
        pair, source = self.make()
        looked, in_time = threading.Event(), list[bool]()

        def look() -> None:
            pair.sender.describe()
            looked.set()

        looker = threading.Thread(target=look)

        def hold(num: int) -> None:
            if num == 1:
                looker.start()
                wait_until(lambda: pair.sender._loop.lock.is_wanted, "the other one wants to look")
            elif num == 2:
                in_time.append(looked.wait(SHORT_S))

        source.during = hold
        transfer_id = pair.open(512)
        with pair.sender._loop.lock:  # all frames are ready in one turn
            pair.send_all(transfer_id, 512)
        pair.closed(transfer_id)
        looker.join(WAIT_S)
        assert in_time == [True]
        pair.stop()

    def test_gauges_are_never_older_than_the_event_that_was_heard(self) -> None:
        pair, _ = self.make()
        seen: list[tuple[str, float, float]] = []
        services: list[KvSendService | KvReceiveService] = []

        def note(record: Events, at: int, event: object) -> None:
            if isinstance(event, Opened | ReceiveClosed | SendClosed):
                gauges = services[at].gauges()
                seen.append((type(event).__name__, gauges["kv_transfers"], gauges.get("kv_frames_in_sockets", 0)))
            record(event)

        network = InProcessNetwork()
        assert pair.sender.stop()
        assert pair.receiver.stop()
        pair.sent, pair.received = Events(), Events()
        pair.sender = KvSendService(
            pair.sender_settings, pair.source, partial(note, pair.sent, 0), make_channel=network.channel
        )
        pair.receiver = KvReceiveService(
            pair.receiver_settings, pair.sink, partial(note, pair.received, 1), make_channel=network.channel
        )
        services += [pair.sender, pair.receiver]
        pair.start()
        transfer_id = pair.open(512)
        pair.send_all(transfer_id, 512)
        pair.closed(transfer_id)
        assert sorted(seen) == [("Opened", 1, 0), ("ReceiveClosed", 0, 0), ("SendClosed", 0, 0)]
        pair.stop()

    def test_a_look_from_within_an_event_is_an_error_not_a_standstill(self) -> None:
        refused: list[str] = []
        network = InProcessNetwork()
        events = Events()

        def look(event: object) -> None:
            try:
                service.describe()
            except InternalError as error:
                refused.append(str(error))
            events(event)

        service = KvSendService(settings(), BytesSource(ROW), look, make_channel=network.channel)
        service.start()
        service.open(spec_for(settings().incarnation))
        assert service.stop()
        events.wait(SendClosed)
        assert len(refused) == 2
        assert "from within its own event" in refused[0]


class TestFairLock:
    def test_goes_to_who_waits_before_who_had_it(self) -> None:
        lock, order = FairLock(), list[str]()

        def other() -> None:
            with lock:
                order.append("other")

        thread = threading.Thread(target=other)
        with lock:
            order.append("mine")
            thread.start()
            wait_until(lambda: lock.is_wanted, "the other one waits")
        with lock:
            order.append("mine again")
        thread.join(WAIT_S)
        assert order == ["mine", "other", "mine again"]

    def test_is_free_after_an_error_within(self) -> None:
        lock = FairLock()
        with pytest.raises(OSError, match="within"), lock:
            raise OSError("within")
        with lock, pytest.raises(InternalError, match="taken twice"), lock:
            pass
        with lock:
            pass
