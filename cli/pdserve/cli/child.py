"""One run of one supervised process: from its start, over the line that tells its addresses, to its exit."""

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from pdserve.cli.parent import PARENT_VARIABLE
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.settings import environment_warnings

LONGEST_LINE_BYTES = 1 << 16
"""Longer log lines are cut into several."""
TAIL_LINES = 12
"""Lines kept to tell why a process died."""
TOPOLOGY_VARIABLES = frozenset(
    f"PDSERVE_{name}"
    for name in (
        "HOST",
        "PORT",
        "ADVERTISE",
        "KV_PORT",
        "KV_ADVERTISE",
        "PREFILL",
        "DECODE",
        "READY_FD",
        "CLUSTER_SECRET_FD",
    )
)
"""Settings that the supervisor decides; the environment's are for processes that run alone."""


class RunState(Enum):
    """Where one run of a process stands."""

    STARTING = auto()
    LISTENING = auto()
    STOPPING = auto()
    EXITED = auto()


class RunEvent(Enum):
    """What happens to one run of a process."""

    ANNOUNCED = auto()
    SIGNALLED = auto()
    ENDED = auto()


RUN_TABLE: TransitionTable[RunState, RunEvent] = TransitionTable(
    name="run",
    initial=RunState.STARTING,
    terminal=frozenset({RunState.EXITED}),
    moves={
        (RunState.STARTING, RunEvent.ANNOUNCED): RunState.LISTENING,
        (RunState.STARTING, RunEvent.SIGNALLED): RunState.STOPPING,
        (RunState.STARTING, RunEvent.ENDED): RunState.EXITED,
        (RunState.LISTENING, RunEvent.SIGNALLED): RunState.STOPPING,
        (RunState.LISTENING, RunEvent.ENDED): RunState.EXITED,
        (RunState.STOPPING, RunEvent.SIGNALLED): RunState.STOPPING,
        (RunState.STOPPING, RunEvent.ENDED): RunState.EXITED,
    },
    ignored=frozenset(
        {
            (RunState.LISTENING, RunEvent.ANNOUNCED),
            (RunState.STOPPING, RunEvent.ANNOUNCED),
            (RunState.EXITED, RunEvent.ANNOUNCED),
            (RunState.EXITED, RunEvent.SIGNALLED),
            (RunState.EXITED, RunEvent.ENDED),
        }
    ),
)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """A process to be supervised. `command` lacks only `--port`, `--ready-fd` and what the supervisor learns later."""

    name: str
    role: str
    command: tuple[str, ...]


class ChildDied(Exception):
    """A process ended, or fell silent, before it was of use."""

    def __init__(self, name: str, status: int | None, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.status = status


class Child:
    """One run of `plan`. The owner awaits `ended` exactly once per run, whatever happened before."""

    def __init__(self, plan: ProcessPlan, on_log: Callable[[str, str], None]) -> None:
        self.plan = plan
        self._on_log = on_log
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._life = LifeCycle(RUN_TABLE, plan.name, asyncio.get_running_loop().time())
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    async def start(self, arguments: Sequence[str], inherited: Sequence[int] = ()) -> None:
        """Start the process in a process group of its own, so that a terminal's Ctrl-C does not reach it.

        It gets the descriptors `inherited` besides.
        """
        ready, given = os.pipe()
        # Unknown variables mean nothing to the process either; the supervisor has warned of them once for all.
        left_out = TOPOLOGY_VARIABLES | environment_warnings().keys()
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.plan.command,
                *arguments,
                "--ready-fd",
                str(given),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(given, *inherited),
                process_group=0,
                env=environment | {PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(given)
        self._pump = asyncio.create_task(self._read(ready), name=f"output of {self.plan.name}")

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not been seen to end."""
        return self._process is not None and not self._life.is_terminal

    async def addresses(self, within_s: float) -> MappingProxyType[str, str]:
        """Return the addresses that the process announced. Raises ChildDied if it ends, or says nothing in time."""
        try:
            line = await asyncio.wait_for(asyncio.shield(self._announced), within_s)
            told = json.loads(line)
            found = {str(name): str(address) for name, address in told.items()}
        except TimeoutError:
            raise ChildDied(self.plan.name, None, f"told no address within {within_s:g} s") from None
        except (ValueError, AttributeError):
            status = await self.ended()
            raise ChildDied(self.plan.name, status, self.reason(status)) from None
        self._advance(RunEvent.ANNOUNCED)
        return MappingProxyType(found)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process; without effect once it ended."""
        if self._process is not None and self._process.returncode is None:
            self._advance(RunEvent.SIGNALLED)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end of the process and of its output; return its exit status, negative for a signal."""
        assert self._process is not None
        assert self._pump is not None
        status = await self._process.wait()
        # A grandchild could hold the pipe open for ever; what the process itself wrote is there by now.
        await asyncio.wait([self._pump], timeout=1.0)
        self._pump.cancel()
        self._advance(RunEvent.ENDED)
        return status

    def reason(self, status: int) -> str:
        """Return how the process ended and, if it failed, its own last words."""
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        if status == 0:
            return "ended (exit status 0)"
        lines = list(self._tail)
        starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
        words = "\n".join(lines[starts[-1] :] if starts else lines[-1:]).removeprefix("error: ")
        return f"failed (exit status {status}): {words}" if words else f"failed (exit status {status})"

    def _advance(self, event: RunEvent) -> None:
        self._life.advance(event, asyncio.get_running_loop().time())

    async def _read(self, ready: int) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_announcement(ready))
            group.create_task(self._read_output())

    async def _read_announcement(self, ready: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ready, "rb", buffering=0)
        )
        try:
            line = await reader.readline()
            if not self._announced.done():
                self._announced.set_result(line.decode(errors="replace"))
        finally:
            transport.close()

    async def _read_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(LONGEST_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take_line(line)
            if len(rest) > LONGEST_LINE_BYTES:
                self._take_line(rest)
                rest = b""
        if rest:
            self._take_line(rest)

    def _take_line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self._tail.append(line)
        self._on_log(self.plan.name, line)
