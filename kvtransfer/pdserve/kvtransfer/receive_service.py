"""The decode node's end of the corridor: one I/O thread that verifies what arrives and places it into the pool."""

import logging
from collections.abc import Callable
from functools import partial

from pdserve.core.clock import Clock, SystemClock
from pdserve.core.ids import Incarnation, TransferId
from pdserve.kvtransfer.channel import Arrived, Channel, ChannelEvent, Connected, Lost
from pdserve.kvtransfer.codec import decode, encode
from pdserve.kvtransfer.events import KvSink, ReceiveClosed, ReceiveEvent, ReceiveFailed, Reopened, TransferSpec
from pdserve.kvtransfer.herald import Herald, log_reopened
from pdserve.kvtransfer.instructions import Emit, Place, Send
from pdserve.kvtransfer.io_loop import IoLoop, Submission
from pdserve.kvtransfer.receiver_table import ReceiverTable
from pdserve.kvtransfer.settings import LinkSettings
from pdserve.kvtransfer.wire import FrameError
from pdserve.kvtransfer.zeromq import ZeroMqChannel

_logger = logging.getLogger(__name__)


class KvReceiveService:
    """Takes KV from prefill nodes. All methods are thread-safe and return at once, except `start` and `stop`."""

    def __init__(
        self,
        settings: LinkSettings,
        sink: KvSink,
        on_event: Callable[[ReceiveEvent], None],
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        clock: Clock | None = None,
        make_channel: Callable[[], Channel] = ZeroMqChannel,
    ) -> None:
        """Prepare to listen at `host`:`port` (0: any free port).

        `advertise` is the host that others dial, if it is not `host`. `on_event` will be called on the I/O thread and must
        return quickly.
        """
        self._clock = clock or SystemClock()
        self._shell = _ReceiveShell(settings, sink, on_event, host, port, self._clock)
        self._loop = IoLoop("pdserve-kv-receive", self._shell, make_channel, self._clock)
        self._advertise = advertise

    def start(self) -> None:
        """Bind and start the I/O thread; raise AddressInUse for a taken port and ConfigError for an impossible host."""
        self._loop.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End all transfers as failed (`shutdown`), and the thread; return whether it ended in time.

        What is expected after that fails at once.
        """
        return self._loop.stop(timeout_s)

    @property
    def endpoint(self) -> str:
        """The address that prefill nodes dial, e.g. `tcp://10.0.0.7:50161`; empty before `start`."""
        scheme, found, place = self._shell.address.partition("://")
        if not found or not self._advertise:
            return self._shell.address
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        return f"{scheme}://{host}:{place.rpartition(':')[2]}"

    def set_peers(self, incarnations: frozenset[Incarnation]) -> None:
        """Name the prefill nodes that may connect, all of them.

        One that greeted before it was named is welcomed now. A link that is no longer named goes when its transfers are over.
        """
        self._loop.submit(partial(self._shell.table.set_peers, frozenset(incarnations)))

    def expect(self, spec: TransferSpec) -> None:
        """A router submitted this transfer: only now can it come. `Opened` follows when the prefill node is near it.

        If the I/O thread is over, `ReceiveFailed` and `ReceiveClosed` come at once, on the calling thread.
        """
        if self._loop.submit(partial(self._shell.table.expect, spec)) is Submission.ENDED:
            herald = self._shell.herald
            herald.tell(
                ReceiveFailed(spec.transfer_id, self._loop.ended_by, "the corridor of the decode node has ended")
            )
            herald.tell(ReceiveClosed(spec.transfer_id))

    def grant(self, transfer_id: TransferId, skip_tokens: int = 0) -> None:
        """Promise blocks, after `Opened`. From here to `ReceiveClosed` the sink may be called."""
        self._loop.submit(partial(self._shell.table.grant, transfer_id, skip_tokens))

    def refuse(self, transfer_id: TransferId, reason: str = "BUSY") -> None:
        """Answer NACK: `reason` is the name of a `NackReason`, or any text. `ReceiveClosed` follows.

        The protocol's way to turn an OPEN down at once. The decode node of today lets it wait for blocks instead, until it is
        granted or `grant_wait_s` makes it BUSY.
        """
        self._loop.submit(partial(self._shell.table.refuse, transfer_id, reason))

    def cancel(self, transfer_id: TransferId, reason: str, busy: bool = False) -> None:
        """End it because the node has no use for it, or (`busy`) no room, as when it evicts or drains.

        `ReceiveClosed` follows; the prefill node gets `SendFailed` with the same `busy`.
        """
        self._loop.submit(partial(self._shell.table.cancel, transfer_id, reason, busy=busy))

    def gauges(self) -> dict[str, float]:
        """Return gauges by name; all without `_total` go back to where they began.

        Never waits. They are those of the last event, or of the end of the I/O thread's last turn if that is later.
        """
        return {**self._shell.herald.gauges, **self._loop.gauges()}

    def describe(self) -> list[dict[str, object]]:
        """Return every machine's state, for people. May wait for one frame to be placed; not for use in `on_event`."""
        with self._loop.lock:
            return self._shell.table.describe(self._clock.now_s())

    def check_invariants(self) -> None:
        """Raise AssertionError if bookkeeping contradicts itself. Waits as `describe` does."""
        with self._loop.lock:
            self._shell.table.check_invariants()


class _ReceiveShell:
    """Carries out what the receiver's machines decide; all of it on the I/O thread."""

    def __init__(
        self,
        settings: LinkSettings,
        sink: KvSink,
        on_event: Callable[[ReceiveEvent], None],
        host: str,
        port: int,
        clock: Clock,
    ) -> None:
        self.table = ReceiverTable(settings)
        self.address = ""
        self._num_failed = 0
        self._num_reopened = 0
        self.herald = Herald(on_event, self._measure_gauges)
        self._sink = sink
        self._host = host
        self._port = port
        self._clock = clock
        self._channel: Channel
        self._is_channel_dropped = False

    def begin(self, channel: Channel) -> None:
        self._channel = channel
        self.address = channel.listen(self._host, self._port)

    def handle(self, event: ChannelEvent, now_s: float) -> None:
        match event:
            case Lost(route, reason):
                self.table.lost(route, reason, now_s)
            case Arrived(route, frames):
                try:
                    message, payload = decode(frames)
                except FrameError as error:
                    self.table.bad_frame(route, str(error), now_s)
                else:
                    self.table.message(route, message, payload, now_s)
            case Connected():
                pass

    def carry_out(self, now_s: float) -> None:
        while (instruction := self.table.take()) is not None:
            match instruction:
                case Emit(event):
                    self._num_failed += isinstance(event, ReceiveFailed) and not event.busy
                    if isinstance(event, Reopened):
                        self._num_reopened += 1
                        log_reopened(event)
                    self.herald.announce(event)
                case _ if self._is_channel_dropped:
                    pass
                case Send(route, message):
                    if not self._channel.send(route, encode(message)):
                        self.table.lost(route, "cannot send", now_s)
                case Place():
                    self._place(instruction, now_s)

    def work(self, now_s: float) -> bool:  # noqa: ARG002 - a receiver only answers
        return False

    def expire(self, now_s: float) -> None:
        self.table.expire(now_s)

    def next_due_s(self) -> float | None:
        return self.table.next_due_s()

    def extend_leases(self, late_s: float) -> None:
        self.table.extend_leases(late_s)

    def publish(self) -> None:
        self.herald.publish()

    def end(self, broken_by: str, now_s: float) -> None:
        self.table.close(now_s, broken_by)

    def drop_channel(self) -> None:
        self._is_channel_dropped = True

    def _measure_gauges(self) -> dict[str, float]:
        return self.table.gauges() | {"kv_failed_total": self._num_failed, "kv_reopened_total": self._num_reopened}

    def _place(self, place: Place, now_s: float) -> None:
        begun_s = self._clock.now_s()
        try:
            self._sink.place(place.transfer_id, place.layers, place.tokens, place.payload)
        except Exception as error:
            _logger.exception("placing failed for transfer %s", place.transfer_id.hex())
            self.table.place_failed(place.transfer_id, repr(error), now_s)
        else:
            self.table.placed(place.transfer_id, self._clock.now_s() - begun_s)
