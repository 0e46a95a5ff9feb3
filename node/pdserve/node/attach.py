"""The Attach stream of one router: hello, lease, submits and cancels in; output, status and beats out.

The stream is the lease. When it breaks, is silent for longer than `lease_s`, cannot be written to for that long, or is
superseded by a newer stream of the same router, all legs of that router are cancelled.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from pdserve.core.clock import Clock
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import Incarnation, LegKey
from pdserve.core.work import LegOutcome, Work
from pdserve.node import pb
from pdserve.node.desk import Desk
from pdserve.node.legs import Legs
from pdserve.node.outbox import Outbox
from pdserve.node.pb import Peer
from pdserve.node.pb_work import work_from_pb
from pdserve.v1 import node_pb2

STATUS_S = 1.0
MIN_STATUS_S = 0.1
MAX_PARTIAL_SUBMITS = 64
MAX_PROMPT_IDS = 4 << 20
MAX_LABEL_CHARS = 128

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Times of a stream, seconds, and the bound on submits that wait."""

    lease_s: float
    beat_s: float
    max_waiting: int


@dataclass(slots=True)
class _PartialSubmit:
    message: node_pb2.Submit
    prompt_ids: list[int]


class RouterStream:
    """One attached router. Made once its hello was read; lives as long as the stream."""

    def __init__(
        self,
        hello: node_pb2.RouterHello,
        desk: Desk,
        legs: Legs,
        settings: StreamSettings,
        clock: Clock,
        is_draining: Callable[[], bool],
        on_peers: Callable[[Incarnation, tuple[Peer, ...]], None],
    ) -> None:
        self.router = Incarnation(hello.incarnation)
        self.number = hello.stream_number
        self._desk, self._legs, self._settings, self._clock = desk, legs, settings, clock
        self._is_draining = is_draining
        self._on_peers = on_peers
        self._outbox: Outbox = legs.attach(self.router)
        self._wake = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._partial: dict[LegKey, _PartialSubmit] = {}
        self._closed = asyncio.Event()
        self._close_reason = ""
        self._heard_s = clock.now_s()
        self._writing_since_s: float | None = None
        self._status_s = float("-inf")
        self._beat_s = clock.now_s()
        self.num_unusable = 0

    def notify(self) -> None:
        """Say that the outbox has something."""
        self._all_sent.clear()
        self._wake.set()

    def close(self, reason: str) -> None:
        """End the stream; only the first reason counts."""
        if not self._closed.is_set():
            self._close_reason = reason
            self._closed.set()
            self._wake.set()

    @property
    def close_reason(self) -> str:
        """Why the stream ended; empty while it lives."""
        return self._close_reason

    async def read(self, requests: AsyncIterator[node_pb2.AttachRequest]) -> None:
        """Take every message of the router until the stream ends."""
        async for request in requests:
            self._heard_s = self._clock.now_s()
            self._take(request)
        self.close("the router closed the stream")

    async def watch(self) -> None:
        """Close the stream when its lease expires. A late loop lengthens the lease by its own lateness."""
        step_s = self._settings.beat_s
        while not self._closed.is_set():
            due_s = self._clock.now_s() + step_s
            await asyncio.sleep(step_s)
            now_s = self._clock.now_s()
            lateness_s = max(0.0, now_s - due_s)
            self._heard_s += lateness_s
            if self._writing_since_s is not None:
                self._writing_since_s += lateness_s
                if now_s - self._writing_since_s > self._settings.lease_s:
                    self.close("the router does not read")
            if now_s - self._heard_s > self._settings.lease_s:
                self.close("the router is silent")

    async def write(self, send: Callable[[node_pb2.AttachResponse], Awaitable[None]]) -> None:
        """Send what comes up, until the stream is closed. `send` may block; `watch` bounds for how long."""
        while not self._closed.is_set():
            response = self._next_message()
            if not self._outbox and (response is None or response.WhichOneof("message") != "step"):
                self._all_sent.set()
            if response is None:
                self._wake.clear()
                await self._wait(self._idle_s())
                continue
            self._beat_s = self._writing_since_s = self._clock.now_s()
            await send(response)
            self._writing_since_s = None

    async def wait_all_sent(self, timeout_s: float) -> None:
        """Return when the outbox is empty and written, when the stream has ended, or after `timeout_s`."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._all_sent, self._closed)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def wait_closed(self) -> None:
        """Return when the stream has ended."""
        await self._closed.wait()

    def _next_message(self) -> node_pb2.AttachResponse | None:
        now_s = self._clock.now_s()
        output = self._outbox.take()
        if output is not None:
            return node_pb2.AttachResponse(step=output)
        if now_s - self._status_s >= STATUS_S:
            self._status_s = now_s
            return node_pb2.AttachResponse(status=self._status())
        if now_s - self._beat_s >= self._settings.beat_s:
            return node_pb2.AttachResponse(beat=node_pb2.Beat(running_step_age_s=self._desk.step_age_s()))
        return None

    def _idle_s(self) -> float:
        now_s = self._clock.now_s()
        return max(0.0, min(self._status_s + STATUS_S, self._beat_s + self._settings.beat_s) - now_s)

    async def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for would make a task for each wait
                await self._wake.wait()

    def load_changed(self) -> None:
        """Send a status soon, at most one per `MIN_STATUS_S`."""
        self._status_s = min(self._status_s, self._clock.now_s() - STATUS_S + MIN_STATUS_S)
        self._wake.set()

    def _status(self) -> node_pb2.NodeStatus:
        load = self._desk.load()
        return node_pb2.NodeStatus(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_waiting_tokens=load.num_waiting_tokens,
            num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks,
            draining=self._is_draining(),
            connected_peers=list(load.connected_peers),
            gauges=self._desk.gauges(),
            kv_admission_key=load.kv_admission_key,
        )

    def _take(self, request: node_pb2.AttachRequest) -> None:
        match request.WhichOneof("message"):
            case "submit":
                self._take_submit(request.submit)
            case "submit_part":
                self._take_part(request.submit_part)
            case "cancel":
                self._take_cancel(request.cancel)
            case "peers":
                self._on_peers(self.router, pb.peers_from_pb(request.peers))
            case "beat":
                pass
            case _:
                self.num_unusable += 1
                logger.warning("a message from a router is of no use here", extra={"peer": self.router.hex()[:8]})

    def _take_submit(self, message: node_pb2.Submit) -> None:
        key = pb.leg_of(self.router, message)
        for older in self._legs.of_session(key.session):
            if older.attempt < key.attempt:
                self._desk.cancel(older, "a newer attempt")
        if message.num_prompt_ids > len(message.prompt_ids):
            if message.num_prompt_ids > MAX_PROMPT_IDS:
                self._refuse_unopened(key, LegOutcome.REFUSED, "prompt_too_long")
                return
            if len(self._partial) >= MAX_PARTIAL_SUBMITS:
                self._refuse_unopened(key, LegOutcome.BUSY, "too_many_partial_submits")
                return
            self._partial[key] = _PartialSubmit(message, list(message.prompt_ids))
            return
        self._submit(key, message, tuple(message.prompt_ids))

    def _take_part(self, message: node_pb2.SubmitPart) -> None:
        key = pb.leg_of(self.router, message)
        partial = self._partial.get(key)
        if partial is None:
            self.num_unusable += 1
            return
        partial.prompt_ids.extend(message.prompt_ids)
        if len(partial.prompt_ids) >= partial.message.num_prompt_ids:
            del self._partial[key]
            self._submit(key, partial.message, tuple(partial.prompt_ids))

    def _take_cancel(self, message: node_pb2.Cancel) -> None:
        key, reason = pb.leg_of(self.router, message), message.reason or "cancelled"
        if not self._legs.is_open(key):
            self._partial.pop(key, None)
            self._legs.tell_released(key)
        elif message.sequences:
            self._desk.cancel_sequences(key, frozenset(message.sequences), reason)
        else:
            self._desk.cancel(key, reason)

    def _submit(self, key: LegKey, message: node_pb2.Submit, prompt_ids: tuple[int, ...]) -> None:
        if not self._legs.open(key, message.request_label[:MAX_LABEL_CHARS]):
            return
        if self._is_draining():
            self._legs.refuse(key, LegOutcome.DRAINED, "draining", "the node takes no new work")
            return
        if self._desk.load().num_waiting >= self._settings.max_waiting:
            self._legs.refuse(key, LegOutcome.BUSY, "queue_full", f"{self._settings.max_waiting} submits wait already")
            return
        try:
            work: Work = work_from_pb(message, self.router, prompt_ids, self._clock.now_s())
        except InvalidRequest as error:
            self.num_unusable += 1
            self._legs.refuse(key, LegOutcome.REFUSED, "unusable_submit", str(error))
            return
        self._desk.submit(work)

    def _refuse_unopened(self, key: LegKey, outcome: LegOutcome, reason: str) -> None:
        if self._legs.open(key):
            self._legs.refuse(key, outcome, reason)
