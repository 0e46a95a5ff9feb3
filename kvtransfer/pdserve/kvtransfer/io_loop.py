"""The thread that a service's machines run on: it waits for frames, commands and deadlines, and never polls.

Commands and received messages are handled before expired timers. When the loop itself was late, leases grow by as
much. A loop that ends, by `stop` or by a fault, ends everything by name and takes no command any more.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Protocol

from pdserve.core.clock import Clock
from pdserve.core.errors import InternalError
from pdserve.kvtransfer.channel import MAX_BATCH, Channel, ChannelEvent
from pdserve.kvtransfer.events import CORRIDOR_BROKEN, SHUTDOWN
from pdserve.kvtransfer.fair_lock import FairLock

_logger = logging.getLogger(__name__)

Command = Callable[[float], None]
"""Something to do on the I/O thread; it is given the time."""
START_TIMEOUT_S = 10.0
WORK_PER_TURN = 8
"""Pieces of work between two looks at what has arrived."""
_LATE_S = 0.05


class Submission(Enum):
    """What became of a command."""

    TAKEN = auto()
    FULL = auto()
    """As many commands wait as the caller accepts."""
    ENDED = auto()
    """The loop is over; `ended_by` says why."""


class Machinery(Protocol):
    """What a service runs on its I/O thread."""

    def begin(self, channel: Channel) -> None:
        """Take the channel over; raise to make `start` fail."""
        ...

    def handle(self, event: ChannelEvent, now_s: float) -> None:
        """Something happened on the channel."""
        ...

    def carry_out(self, now_s: float) -> None:
        """Execute the instructions that are waiting."""
        ...

    def work(self, now_s: float) -> bool:
        """Do one piece of what is possible now; False if there was none."""
        ...

    def expire(self, now_s: float) -> None:
        """Do what is due."""
        ...

    def next_due_s(self) -> float | None:
        """When `expire` must be called."""
        ...

    def extend_leases(self, late_s: float) -> None:
        """The loop was late."""
        ...

    def publish(self) -> None:
        """Show others how things stand."""
        ...

    def end(self, broken_by: str, now_s: float) -> None:
        """End everything by name; `carry_out` follows, then the channel closes. `broken_by` is empty for an orderly end."""
        ...

    def drop_channel(self) -> None:
        """The channel is of no use any more: from here on `carry_out` only tells events."""
        ...


class IoLoop:
    """Runs one `Machinery` on one thread."""

    def __init__(self, name: str, machinery: Machinery, make_channel: Callable[[], Channel], clock: Clock) -> None:
        self._machinery = machinery
        self._make_channel = make_channel
        self._clock = clock
        self._channel: Channel | None = None
        self._commands: deque[Command] = deque()
        self._door = threading.Lock()
        """Held to add a command, and to end that: so none is added to a loop that will not run it."""
        self.ended_by = ""
        """Why no command is taken any more; empty while they are."""
        self._is_woken = False
        self._is_stopping = False
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.lock = FairLock()
        """Held while machines run; passed on between two events, commands or pieces of work to who wants to look at them."""
        self.num_errors = 0
        """Exceptions that should not have happened; each is logged."""

    def start(self) -> None:
        """Start the thread and wait until its channel is ready; raise what kept it from that."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise InternalError(f"the I/O thread did not start within {START_TIMEOUT_S} s")
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    def submit(self, command: Command, bound: int | None = None) -> Submission:
        """Have `command` run on the I/O thread, unless `bound` commands wait already. Thread-safe, microseconds."""
        with self._door:
            if self.ended_by:
                return Submission.ENDED
            if bound is not None and len(self._commands) >= bound:
                return Submission.FULL
            self._commands.append(command)
        channel = self._channel
        if not self._is_woken and channel is not None:
            self._is_woken = True
            channel.wake()
        return Submission.TAKEN

    def gauges(self) -> dict[str, float]:
        """Return the gauges of the thread and of its channel. Never waits."""
        channel = self._channel
        own = {} if channel is None or self.ended_by else channel.gauges()
        return {**own, "kv_io_errors_total": self.num_errors}

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return whether it ended in time."""
        self._is_stopping = True
        if self._channel is not None:
            self._channel.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            channel = self._make_channel()
        except Exception as error:  # noqa: BLE001 - handed to the thread that called `start`
            self._start_error = error
            self._close_door(CORRIDOR_BROKEN)
            self._started.set()
            return
        try:
            self._machinery.begin(channel)
            self._channel = channel
        except Exception as error:  # noqa: BLE001 - handed to the thread that called `start`
            self._start_error = error
            self._close_door(CORRIDOR_BROKEN)
            channel.close()
            self._started.set()
            return
        self._started.set()
        broken_by = "the I/O thread was ended"
        try:
            self._run(channel)
            broken_by = ""
        except Exception as error:
            self.num_errors += 1
            broken_by = repr(error)
            _logger.exception("%s: the I/O loop broke; all transfers end", self._thread.name)
        finally:
            self._finish(channel, broken_by)

    def _run(self, channel: Channel) -> None:
        now_s, due_s = self._clock.now_s(), None
        may_do_more = True
        while not self._is_stopping:
            timeout_s = self._timeout_s(due_s, now_s, may_do_more)
            planned_s = None if timeout_s is None else now_s + timeout_s
            events = channel.poll(timeout_s)
            now_s = self._clock.now_s()
            with self.lock:
                if planned_s is not None and now_s - planned_s > _LATE_S:
                    self._machinery.extend_leases(now_s - planned_s)
                # Commands first: what a node asked for before a message was sent is done before the message is handled.
                self._is_woken = False
                for _ in range(len(self._commands)):
                    self._guard(self._commands.popleft(), now_s)
                for event in events:
                    self._guard(partial(self._machinery.handle, event), now_s)
                if len(events) < MAX_BATCH:
                    self._guard(self._machinery.expire, now_s)
                may_do_more = self._work() or len(events) == MAX_BATCH
                self._machinery.publish()
                due_s = self._machinery.next_due_s()

    def _timeout_s(self, due_s: float | None, now_s: float, may_do_more: bool) -> float | None:
        if may_do_more or self._commands:
            return 0.0
        return None if due_s is None else max(0.0, due_s - now_s)

    def _work(self) -> bool:
        """Work for one turn, letting others look in between; return whether more can be done."""
        may_do_more = True

        def work(now_s: float) -> None:
            nonlocal may_do_more
            may_do_more = False
            may_do_more = self._machinery.work(now_s)

        for _ in range(WORK_PER_TURN):
            self._guard(work, self._clock.now_s())
            if not may_do_more:
                break
        return may_do_more

    def _guard(self, act: Command, now_s: float) -> None:
        """Run one thing and what follows from it, the lock held; then pass that on.

        An error of ours fails that thing; deadlines end what it left behind.
        """
        try:
            act(now_s)
            self._machinery.carry_out(now_s)
        except Exception:
            self.num_errors += 1
            _logger.exception("%s: an event could not be handled", self._thread.name)
        self.lock.pass_on()

    def _close_door(self, ended_by: str) -> None:
        with self._door:
            self.ended_by = ended_by

    def _finish(self, channel: Channel, broken_by: str) -> None:
        """Let nothing in any more, and end what is there: in words to the peers if the channel still carries them."""
        self._close_door(CORRIDOR_BROKEN if broken_by else SHUTDOWN)
        now_s = self._clock.now_s()
        with self.lock:
            while self._commands:
                self._guard(self._commands.popleft(), now_s)
            self._guard(partial(self._machinery.end, broken_by), now_s)
            # A channel that carries nothing keeps no event from the node.
            self._machinery.drop_channel()
            self._guard(lambda _: None, now_s)
            self._guard(lambda _: channel.close(), now_s)
            self._machinery.publish()
