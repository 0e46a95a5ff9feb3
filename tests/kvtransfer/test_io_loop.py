"""The I/O thread under the services: what a node sees when it breaks or ends."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from pdserve.core.clock import SystemClock
from pdserve.core.ids import TransferId
from pdserve.kvtransfer import (
    CorridorBroken,
    KvReceiveService,
    KvSendService,
    PeerDown,
    ReceiveClosed,
    ReceiveFailed,
    SendClosed,
    SendFailed,
)
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import Channel, ChannelEvent, Route
from pdserve.kvtransfer.inprocess import InProcessChannel, InProcessNetwork
from pdserve.kvtransfer.io_loop import IoLoop, Submission
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import FIRST, WAIT_S, Pair, settings, wait_until

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Breakable:
    """A channel that works until `is_broken`; then nothing of it does, or (`only_poll`) all but waiting."""

    def __init__(self, channel: Channel, only_poll: bool) -> None:
        self._channel = channel
        self._only_poll = only_poll
        self.is_broken = False

    def listen(self, host: str, port: int) -> str:
        return self._channel.listen(host, port)

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        self._check()
        return self._channel.connect(address, shown)

    def trust(self, route: Route) -> None:
        self._check()
        self._channel.trust(route)

    def disconnect(self, route: Route) -> None:
        self._check()
        self._channel.disconnect(route)

    def send(self, route: Route, header: bytes) -> bool:
        self._check()
        return self._channel.send(route, header)

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        self._check()
        return self._channel.send_data(route, header, payload, on_released)

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        events = self._channel.poll(timeout_s)
        self._check(is_poll=True)
        return events

    def gauges(self) -> dict[str, float]:
        return self._channel.gauges()

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._channel.close()
        self._check()

    def _check(self, is_poll: bool = False) -> None:
        if self.is_broken and (is_poll or not self._only_poll):
            raise OSError("the descriptor is gone")


class Breaking:
    """A connected pair, one end of which stands on a channel that can be broken."""

    def __init__(self, make_channel: Callable[[], Channel], side: str, only_poll: bool) -> None:
        # Long enough for a busy machine to connect, and short for the end that waits in vain for the broken one to come back.
        self.pair = Pair.make(make_channel, settings(connect_wait_s=1.0), settings(connect_wait_s=1.0))
        self.channels: list[Breakable] = []

        def make() -> Channel:
            self.channels.append(Breakable(make_channel(), only_poll))
            return self.channels[-1]

        pair = self.pair
        if side == "sender":
            pair.sender = KvSendService(pair.sender_settings, pair.source, pair.sent, make_channel=make)
        else:
            pair.receiver = KvReceiveService(pair.receiver_settings, pair.sink, pair.received, make_channel=make)
        pair.start()
        self.is_sender = side == "sender"
        self.service: KvSendService | KvReceiveService = pair.sender if self.is_sender else pair.receiver
        self.events, self.others = (pair.sent, pair.received) if self.is_sender else (pair.received, pair.sent)

    def break_it(self) -> None:
        self.channels[0].is_broken = True
        self.channels[0].wake()

    def begin(self) -> TransferId:
        """Give the broken end one more transfer."""
        mine, theirs = self.pair.specs()
        if self.is_sender:
            self.pair.sender.open(mine)
        else:
            self.pair.receiver.expect(theirs)
        return mine.transfer_id

    @property
    def ending(self) -> list[str]:
        return ["SendFailed", "SendClosed"] if self.is_sender else ["ReceiveFailed", "ReceiveClosed"]

    def reasons(self, transfer_id: TransferId) -> list[str]:
        failed = (SendFailed, ReceiveFailed)
        return [event.reason for event in self.events.of(transfer_id) if isinstance(event, failed)]


@pytest.fixture(params=["inprocess", "zeromq"])
def make_channel(request: pytest.FixtureRequest) -> Callable[[], Channel]:
    return ZeroMqChannel if request.param == "zeromq" else InProcessNetwork().channel


@pytest.mark.parametrize("side", ["sender", "receiver"])
class TestABrokenLoop:
    """A loop that broke used to leave a node that took work for ever, and a queue of commands that grew with it."""

    @pytest.mark.parametrize("only_poll", [True, False])
    def test_ends_every_transfer_by_name_and_tells_the_node(
        self, make_channel: Callable[[], Channel], side: str, only_poll: bool
    ) -> None:
        broken = Breaking(make_channel, side, only_poll)
        transfer_ids = [broken.pair.open(), broken.pair.open(), broken.begin()]
        broken.break_it()
        assert "the descriptor is gone" in broken.events.wait(CorridorBroken).reason
        for each in transfer_ids:
            assert broken.events.kinds(each)[-2:] == broken.ending
            assert broken.reasons(each) == ["corridor_broken"]
        assert isinstance(broken.events.all[-1], CorridorBroken), "the last word, when everything else was said"
        assert broken.events.wait(PeerDown).reason == "corridor_broken"
        broken.others.wait(PeerDown)
        broken.others.wait(ReceiveClosed if broken.is_sender else SendClosed)
        assert broken.service.stop()
        for service in (broken.pair.sender, broken.pair.receiver):
            assert service.stop()
            service.check_invariants()
        left = {name: value for name, value in broken.service.gauges().items() if not name.endswith("_total")}
        assert set(left.values()) == {0}
        assert broken.service.gauges()["kv_io_errors_total"] > 0

    def test_fails_what_comes_later_at_once_and_keeps_no_command(
        self, make_channel: Callable[[], Channel], side: str
    ) -> None:
        broken = Breaking(make_channel, side, only_poll=True)
        pair = broken.pair
        broken.break_it()
        broken.events.wait(CorridorBroken)
        transfer_id = broken.begin()
        assert broken.events.kinds(transfer_id) == broken.ending, "told before the call returns"
        assert broken.reasons(transfer_id) == ["corridor_broken"]
        for token in range(20):
            pair.sender.set_peers({}) if broken.is_sender else pair.receiver.set_peers(frozenset())
            if broken.is_sender:
                pair.sender.mark_ready(transfer_id, range(1), range(token, token + 1))
                pair.sender.commit(transfer_id, FIRST, {})
                pair.sender.abort(transfer_id, "late")
            else:
                pair.receiver.grant(transfer_id)
                pair.receiver.refuse(transfer_id)
                pair.receiver.cancel(transfer_id, "late")
        assert len(broken.service._loop._commands) == 0
        assert pair.sender._overflowed == set()
        assert broken.events.kinds(transfer_id) == broken.ending
        assert pair.sender.stop()
        assert pair.receiver.stop()

    def test_after_an_orderly_stop_too(self, make_channel: Callable[[], Channel], side: str) -> None:
        stopped = Breaking(make_channel, side, only_poll=True)
        assert stopped.service.stop()
        transfer_id = stopped.begin()
        assert stopped.events.kinds(transfer_id) == stopped.ending
        assert stopped.reasons(transfer_id) == ["shutdown"]
        assert not [event for event in stopped.events.all if isinstance(event, CorridorBroken)]
        assert len(stopped.service._loop._commands) == 0
        assert stopped.pair.sender.stop()
        assert stopped.pair.receiver.stop()


@pytest.mark.parametrize("name", ["next_due_s", "publish"])
def test_a_fault_between_two_turns_ends_everything_and_leaves_the_lock_free(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One lock is held for a whole turn: what fails within it must not keep it."""
    pair = Pair.make(InProcessNetwork().channel).start()
    transfer_id = pair.open()

    def fails() -> None:
        monkeypatch.undo()
        raise OSError("planted")

    monkeypatch.setattr(pair.sender._shell, name, fails)
    pair.sender._loop.submit(lambda now_s: None)
    assert "planted" in pair.sent.wait(CorridorBroken).reason
    assert pair.sent.kinds(transfer_id)[-2:] == ["SendFailed", "SendClosed"]
    assert pair.sender.stop()
    assert pair.sender.describe() == []
    assert pair.receiver.stop()


def test_a_channel_that_fails_only_while_it_ends_keeps_no_event_from_the_node() -> None:
    broken = Breaking(InProcessNetwork().channel, "sender", only_poll=False)
    transfer_ids = [broken.begin() for _ in range(3)]

    def break_sending(now_s: float) -> None:
        broken.channels[0].poll = lambda timeout_s: []  # type: ignore[method-assign]  # waiting works, nothing else does
        broken.channels[0].is_broken = True

    with broken.service._loop.lock:  # the command runs when the loop is told to stop already
        broken.service._loop.submit(break_sending)
        broken.service._loop._is_stopping = True
    assert broken.service.stop()
    for transfer_id in transfer_ids:
        assert broken.events.kinds(transfer_id)[-2:] == broken.ending
    assert broken.pair.receiver.stop()


def test_a_command_is_run_or_refused_never_kept() -> None:
    """Commands of several threads while the loop ends: each that was taken has run when the thread is over."""
    ran: list[int] = []

    class Nothing:
        def begin(self, channel: Channel) -> None: ...
        def handle(self, event: ChannelEvent, now_s: float) -> None: ...
        def carry_out(self, now_s: float) -> None: ...
        def work(self, now_s: float) -> bool:
            return False

        def expire(self, now_s: float) -> None: ...
        def next_due_s(self) -> float | None:
            return None

        def extend_leases(self, late_s: float) -> None: ...
        def publish(self) -> None: ...
        def end(self, broken_by: str, now_s: float) -> None: ...
        def drop_channel(self) -> None: ...

    def run(number: int, now_s: float) -> None:
        ran.append(number)

    loop = IoLoop("test", Nothing(), InProcessNetwork().channel, SystemClock())
    loop.start()
    taken: list[int] = []
    ended = threading.Event()

    def submit(first: int) -> None:
        number = first
        while loop.submit(partial(run, number)) is Submission.TAKEN:
            taken.append(number)
            number += 4
        ended.set()

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(ran) > 100, "commands run")
    assert loop.stop(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert ended.is_set()
    assert sorted(ran) == sorted(taken)


def test_the_breakable_channel_is_a_channel() -> None:
    """The fault injector itself: it works until it is broken."""
    channel = Breakable(InProcessChannel(InProcessNetwork()), only_poll=True)
    assert channel.poll(0.0) == []
    channel.is_broken = True
    with pytest.raises(OSError, match="descriptor"):
        channel.poll(0.0)
    channel.close()
