"""The prefill node's end of the corridor: one I/O thread that packs from the pool and sends while layers still compute."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from pdserve.core.clock import Clock, SystemClock
from pdserve.core.errors import ConfigError
from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.work import SampledToken
from pdserve.kvtransfer.admission import Credentials, credentials
from pdserve.kvtransfer.channel import Arrived, Channel, ChannelEvent, Connected, LendingChannel, Lost, Route
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES, NONCE_BYTES, decode, encode
from pdserve.kvtransfer.events import KvSource, Reopened, SendClosed, SendEvent, SendFailed, TransferSpec, TransferStats
from pdserve.kvtransfer.herald import Herald, log_reopened
from pdserve.kvtransfer.instructions import Dial, Emit, HangUp, Send, Trust
from pdserve.kvtransfer.io_loop import IoLoop, Submission
from pdserve.kvtransfer.messages import Hello
from pdserve.kvtransfer.sender_link import SenderLink
from pdserve.kvtransfer.sender_table import DataPlan, SenderTable
from pdserve.kvtransfer.settings import LinkSettings
from pdserve.kvtransfer.staging import Slab, StagingPool
from pdserve.kvtransfer.wire import FrameError, checksum
from pdserve.kvtransfer.zeromq import ZeroMqChannel

_logger = logging.getLogger(__name__)


class KvSendService:
    """Hands KV over to decode nodes. All methods are thread-safe and return at once, except `start` and `stop`."""

    def __init__(
        self,
        settings: LinkSettings,
        source: KvSource,
        on_event: Callable[[SendEvent], None],
        clock: Clock | None = None,
        make_channel: Callable[[], Channel] = ZeroMqChannel,
    ) -> None:
        """Prepare; `on_event` will be called on the I/O thread and must return quickly.

        Raises ConfigError if the identity is too large for a HELLO.
        """
        _check_hello(settings)
        self._clock = clock or SystemClock()
        self._settings = settings
        self._shell = _SendShell(settings, source, on_event, self._clock)
        self._loop = IoLoop("pdserve-kv-send", self._shell, make_channel, self._clock)
        self._overflowed: set[TransferId] = set()

    def start(self) -> None:
        """Start the I/O thread."""
        self._loop.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End all transfers as failed (`shutdown`), and the thread; return whether it ended in time.

        What is opened after that fails at once.
        """
        return self._loop.stop(timeout_s)

    def set_peers(
        self, peers: Mapping[Incarnation, str], admission_keys: Mapping[Incarnation, bytes] | None = None
    ) -> None:
        """Name the decode nodes and their addresses, all of them. New ones are dialled at once.

        A link that is no longer named goes when its transfers are over. `admission_keys` are the latest that the decode nodes
        handed out: the next connection to each is opened with it.
        """
        self._loop.submit(partial(self._shell.set_peers, dict(peers), dict(admission_keys or {})))

    def open(self, spec: TransferSpec) -> None:
        """Announce a transfer. `Granted` or `SendFailed` follows within the deadlines of the settings.

        If the I/O thread is over, `SendFailed` and `SendClosed` come at once, on the calling thread.
        """
        if self._loop.submit(partial(self._shell.table.open, spec)) is Submission.ENDED:
            herald = self._shell.herald
            herald.tell(SendFailed(spec.transfer_id, self._loop.ended_by, "the corridor of the prefill node has ended"))
            herald.tell(SendClosed(spec.transfer_id, TransferStats()))

    def mark_ready(self, transfer_id: TransferId, layers: range, tokens: range) -> None:
        """Say that a range is computed; call it from the engine's thread, inside a forward.

        Ranges of one transfer must not overlap. If too many marks wait, the transfer fails (`mark_overflow`).
        """
        mark = partial(self._shell.table.mark_ready, transfer_id, layers, tokens)
        submission = self._loop.submit(mark, bound=self._settings.max_waiting_marks)
        if submission is not Submission.FULL or transfer_id in self._overflowed:
            return
        self._overflowed.add(transfer_id)
        self._loop.submit(partial(self._fail_overflowed, transfer_id))

    def commit(
        self, transfer_id: TransferId, tokens: tuple[SampledToken, ...], durations_s: Mapping[str, float]
    ) -> None:
        """Say that every range is marked and the first tokens are sampled. `Acked` or `SendFailed` follows."""
        asked_s = self._clock.now_s()
        self._loop.submit(partial(self._shell.table.commit, transfer_id, tokens, dict(durations_s), asked_s))

    def abort(self, transfer_id: TransferId, reason: str, finished: bool = False, busy: bool = False) -> None:
        """Give up, or say that nothing is wrong: `finished`, all sequences ended at their first token; `busy`, no room.

        `SendClosed` follows; the decode node gets `FinishedEarly`, or `ReceiveFailed` with the same `busy`. Raises ValueError
        if both are said.
        """
        if finished and busy:
            raise ValueError("an abort is either finished or busy")
        self._loop.submit(partial(self._shell.table.abort, transfer_id, reason, finished, busy=busy))

    def gauges(self) -> dict[str, float]:
        """Return gauges by name; all without `_total` go back to where they began.

        Never waits. They are those of the last event, or of the end of the I/O thread's last turn if that is later.
        """
        return {**self._shell.herald.gauges, **self._loop.gauges()}

    def describe(self) -> list[dict[str, object]]:
        """Return every machine's state, for people. May wait for one frame to be packed; not for use in `on_event`."""
        with self._loop.lock:
            return self._shell.table.describe(self._clock.now_s())

    def check_invariants(self) -> None:
        """Raise AssertionError if bookkeeping contradicts itself. Waits as `describe` does."""
        with self._loop.lock:
            self._shell.table.check_invariants()
            self._shell.staging.check_invariants()

    def _fail_overflowed(self, transfer_id: TransferId, now_s: float) -> None:
        self._overflowed.discard(transfer_id)
        self._shell.table.fault(transfer_id, "mark_overflow", "too many ready marks wait", now_s)


class _SendShell:
    """Carries out what the sender's machines decide; all of it on the I/O thread."""

    def __init__(
        self, settings: LinkSettings, source: KvSource, on_event: Callable[[SendEvent], None], clock: Clock
    ) -> None:
        self.table = SenderTable(settings)
        self._settings = settings
        self._admission_keys: Mapping[Incarnation, bytes] = {}
        self.staging = StagingPool(settings.staging_bytes // MAX_FRAME_BYTES, MAX_FRAME_BYTES)
        self._num_failed = 0
        self._num_reopened = 0
        self.herald = Herald(on_event, self._measure_gauges)
        self._source = source
        self._clock = clock
        self._channel: Channel
        self._lender: LendingChannel | None = None
        self._is_channel_dropped = False

    def begin(self, channel: Channel) -> None:
        self._channel = channel
        self._lender = channel if isinstance(channel, LendingChannel) else None

    def handle(self, event: ChannelEvent, now_s: float) -> None:
        match event:
            case Connected(route):
                self.table.connected(route, now_s)
            case Lost(route, reason):
                self.table.lost(route, reason, now_s)
            case Arrived(route, frames):
                try:
                    message, _ = decode(frames)
                except FrameError as error:
                    self.table.bad_frame(route, str(error), now_s)
                else:
                    self.table.message(route, message, now_s)

    def carry_out(self, now_s: float) -> None:
        while (instruction := self.table.take()) is not None:
            match instruction:
                case Emit(event):
                    self._num_failed += isinstance(event, SendFailed) and not event.busy
                    if isinstance(event, Reopened):
                        self._num_reopened += 1
                        log_reopened(event)
                    self.herald.announce(event)
                case _ if self._is_channel_dropped:
                    pass
                case Dial(peer, address):
                    self.table.dialled(peer, self._channel.connect(address, self._credentials(peer)))
                case Trust(route):
                    self._channel.trust(route)
                case HangUp(route):
                    self._channel.disconnect(route)
                    self.staging.forget(route)
                case Send():
                    self._send(instruction, now_s)

    def work(self, now_s: float) -> bool:
        plan = self.table.next_data(self.staging, now_s)
        if plan is not None:
            self._send_data(plan, now_s)
        return plan is not None

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

    def set_peers(
        self, peers: Mapping[Incarnation, str], admission_keys: Mapping[Incarnation, bytes], now_s: float
    ) -> None:
        self._admission_keys = admission_keys
        self.table.set_peers(peers, now_s)

    def _credentials(self, peer: Incarnation) -> Credentials | None:
        key, settings = self._admission_keys.get(peer), self._settings
        return None if key is None else credentials(key, settings.secret, settings.incarnation, peer)

    def _measure_gauges(self) -> dict[str, float]:
        return self.table.gauges() | {
            "kv_staging_bytes": self.staging.leased_bytes,
            "kv_failed_total": self._num_failed,
            "kv_reopened_total": self._num_reopened,
        }

    def _send(self, instruction: Send, now_s: float) -> None:
        try:
            header = encode(instruction.message)
        except FrameError as error:
            transfer_id = getattr(instruction.message, "transfer_id", None)
            if transfer_id is None:
                self.table.lost(instruction.route, f"cannot encode: {error}", now_s)
            else:
                self.table.fault(transfer_id, "cannot_encode", str(error), now_s)
            return
        if not self._channel.send(instruction.route, header):
            self.table.lost(instruction.route, "cannot send", now_s)

    def _send_data(self, plan: DataPlan, now_s: float) -> None:
        spec, frame = plan.transfer.spec, plan.frame
        route = plan.link.route
        assert route is not None
        slab: Slab | None = None
        payload = None if self._lender is None else self._lender.lend(route, frame.num_bytes)
        if payload is None:
            slab = self.staging.lease(route, now_s)
            payload = slab.view(frame.num_bytes)
        begun_s = self._clock.now_s()
        try:
            self._source.pack(spec.transfer_id, frame.layers, frame.tokens, payload)
        except Exception as error:
            if slab is not None:
                slab.release(now_s)
            _logger.exception("packing failed for transfer %s", spec.transfer_id.hex())
            self.table.fault(spec.transfer_id, "pack_failed", repr(error), now_s)
            return
        header = encode(plan.transfer.header(frame, checksum(payload)))
        pack_s = self._clock.now_s() - begun_s
        # Counted before the socket has it: a channel may release it at once.
        self.table.data_sent(plan, pack_s, now_s)
        released = partial(self._released, slab, plan.link, route)
        if not self._channel.send_data(route, header, payload, released):
            if slab is not None:
                slab.release(now_s)
            self.table.lost(route, "cannot send", now_s)

    def _released(self, slab: Slab | None, link: SenderLink, route: Route) -> None:
        if slab is not None:
            slab.release(self._clock.now_s())
        self.table.data_released(link, route)


def _check_hello(settings: LinkSettings) -> None:
    mine = settings.incarnation
    try:
        encode(Hello(mine, mine, bytes(NONCE_BYTES), settings.offer))
    except FrameError as error:
        raise ConfigError([f"the identity does not fit a HELLO: {error}"]) from error
