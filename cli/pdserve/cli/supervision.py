"""The life of a supervised cluster in one call: run it, notice stop signals, drain, and leave nothing behind."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from pdserve.cli.events import Draining, Failed, Reporter, Stopped
from pdserve.cli.exit_codes import ExitCode, exit_code_of
from pdserve.cli.supervisor import ClusterFailed, Supervisor
from pdserve.core.errors import InternalError, PdserveError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IDLE_DRAIN_S = 5.0
"""Time to end in when no answer is to be waited for: the cluster was not ready yet, or ends because of a failure."""


class StopSignals:
    """The first stop signal asks for a drain, the second for an end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def take(self) -> None:
        """Count one signal."""
        (self.second if self.first.is_set() else self.first).set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Listen for stop signals while the context is open."""
        loop = asyncio.get_running_loop()
        # Under nohup the end of the terminal is no reason to stop.
        is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in STOP_SIGNALS if number is not signal.SIGHUP or not is_detached]
        for number in numbers:
            loop.add_signal_handler(number, self.take)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def supervise(
    supervisor: Supervisor,
    reporter: Reporter,
    drain_s: float,
    work: Callable[[], Awaitable[None]] | None = None,
) -> ExitCode:
    """Run a cluster until a stop signal, a failure, or the end of `work`, which starts when the cluster is ready.

    Returns OK after a drain, and INTERRUPTED if a signal came before the work was done or a second one cut the drain short.
    Raises what ended the cluster or the work. No process is left on any path.
    """
    stop = StopSignals()
    is_ready = asyncio.Event()

    async def work_when_ready() -> None:
        await is_ready.wait()
        assert work is not None
        await work()

    with stop.installed():
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(supervisor.run(is_ready.set), name="cluster"),
            asyncio.create_task(stop.first.wait(), name="first stop signal"),
        ]
        if work is not None:
            tasks.append(asyncio.create_task(work_when_ready(), name="work"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await end_tasks(tasks)
            failures = [error for task in done if (error := task.exception()) is not None]
            for error in failures:
                reporter.event(failed_event(error))
            has_work = is_ready.is_set() and not failures
            code = await drain(supervisor, reporter, drain_s if has_work else min(drain_s, IDLE_DRAIN_S), stop)
        finally:
            await end_tasks(tasks)
            await supervisor.kill()
    if failures:
        raise failures[0]
    was_interrupted = work is not None and stop.first.is_set()
    return ExitCode.INTERRUPTED if was_interrupted else code


def failed_event(error: BaseException) -> Failed:
    """Return what to report when the cluster, or the work on it, ends with `error`."""
    if isinstance(error, ClusterFailed):
        return Failed(str(error), error.exit_code, "CLUSTER_FAILED")
    if isinstance(error, PdserveError):
        return Failed(error.message, exit_code_of(error), error.reason, error.hint)
    return Failed(f"{type(error).__name__}: {error}", ExitCode.FAILED, InternalError("").reason)


async def drain(supervisor: Supervisor, reporter: Reporter, within_s: float, stop: StopSignals) -> ExitCode:
    """Drain within the time given and a grace, or until the second stop signal; kill what is left then."""
    reporter.event(Draining(within_s))
    draining = asyncio.create_task(supervisor.drain(within_s), name="drain")
    second = asyncio.create_task(stop.second.wait(), name="second stop signal")
    try:
        await asyncio.wait([draining, second], return_when=asyncio.FIRST_COMPLETED)
        is_cut_short = not draining.done()
        has_drained = False if is_cut_short else draining.result()
    finally:
        await end_tasks([draining, second])
        await supervisor.kill()
    reporter.event(Stopped(has_drained))
    return ExitCode.INTERRUPTED if is_cut_short else ExitCode.OK if has_drained else ExitCode.FAILED


async def end_tasks(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end; their results stay readable."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
