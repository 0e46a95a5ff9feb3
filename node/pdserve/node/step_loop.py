"""The loop that plans a step, runs it on the engine's thread, and applies its result. It never waits for the network."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.core.clock import Clock
from pdserve.engine.batch import ChunkResult

P = TypeVar("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step's results: what each chunk of the plan got, and how long the step took."""

    results: tuple[ChunkResult, ...]
    compute_s: float


class StepLoop(Generic[P, R]):
    """Runs steps one after another as long as `plan` gives any, and sleeps until `wake` otherwise.

    `plan`, `apply` and `fail` run on the event loop's thread; `execute` runs on the one engine thread.
    """

    def __init__(
        self,
        *,
        plan: Callable[[], P | None],
        execute: Callable[[P], R],
        apply: Callable[[P, R], None],
        fail: Callable[[P, Exception], None],
        clock: Clock,
    ) -> None:
        self._plan, self._execute, self._apply, self._fail = plan, execute, apply, fail
        self._clock = clock
        self._wake = asyncio.Event()
        self._started_s: float | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.num_steps = 0
        self.num_failed_steps = 0

    def wake(self) -> None:
        """Say that there may be something to plan."""
        self._wake.set()

    def step_age_s(self) -> float:
        """Return the age of the running step, seconds; 0 when none runs."""
        return 0.0 if self._started_s is None else self._clock.now_s() - self._started_s

    async def run(self) -> None:
        """Run until cancelled. A step under way is finished first: its blocks are in use."""
        loop = asyncio.get_running_loop()
        while True:
            plan = self._plan()
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._started_s = self._clock.now_s()
            step = loop.run_in_executor(self._thread, self._execute, plan)
            cancelled = await _settle(step)
            self._started_s = None
            self.num_steps += 1
            self._finish(plan, step)
            if cancelled:
                raise asyncio.CancelledError

    def close(self) -> None:
        """Wait for the running step and end the engine's thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _finish(self, plan: P, step: "asyncio.Future[R]") -> None:
        error = step.exception()
        if error is None:
            self._apply(plan, step.result())
            return
        if not isinstance(error, Exception):
            raise error
        self.num_failed_steps += 1
        logger.error("a step failed; its requests end with an error", exc_info=error)
        self._fail(plan, error)


async def _settle(step: "asyncio.Future[R]") -> bool:
    """Wait until `step` is done, whatever comes. Returns whether a cancellation arrived meanwhile.

    A cancellation is only put off: the step's thread writes into blocks that may be freed after it. A step that never ends is
    ended with the process (`node.process`).
    """
    cancelled = False
    while not step.done():
        try:
            await asyncio.wait({step})
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
