"""The supervisor with real, tiny processes: start, death, restart, drain, and nothing left behind."""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from pdserve.cli.events import Event, Exited, Started
from pdserve.cli.exit_codes import ExitCode
from pdserve.cli.restarts import RestartPolicy
from pdserve.cli.supervision import supervise
from pdserve.cli.supervisor import ClusterFailed, ClusterPlan, Supervisor
from pdserve.core.errors import AddressInUse, NoNodes
from pdserve.core.handed_secret import HandedSecret
from tests.cli.stub_supervisor import always_ready, stub_plan

DEADLINE_S = 30.0
SUPERVISOR = Path(__file__).with_name("stub_supervisor.py")


class Recorder:
    """Keeps events and log lines, and lets a test wait for one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.logs: list[str] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def event(self, event: Event) -> None:
        self.events.append(event)
        self._wake()

    def log(self, name: str, line: str) -> None:
        self.logs.append(f"{name} {line}")
        self._wake()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if type(event) is kind]

    async def seen(self, kind: str, count: int = 1) -> None:
        """Wait until `count` events of `kind` were reported."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: sum(event.kind == kind for event in self.events) >= count)

    async def logged(self, start: str) -> str:
        """Wait for a log line that begins so, and return it."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(lambda: any(line.startswith(start) for line in self.logs))
        return next(line for line in self.logs if line.startswith(start))

    def _wake(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.asynccontextmanager
async def running(
    plan: ClusterPlan, on_addresses: Callable[[Sequence[str]], None] = lambda _: None
) -> AsyncIterator[tuple[Supervisor, Recorder, asyncio.Task[None]]]:
    """A supervisor at work; afterwards no process of it is left."""
    recorder = Recorder()
    supervisor = Supervisor(plan, recorder, always_ready, on_addresses)
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, recorder, task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await supervisor.kill()
        for event in recorder.of(Started):
            assert isinstance(event, Started)
            assert not is_alive(event.pid), event.name


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def file_of(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def environment_of(pid: int) -> bytes:
    return file_of(pid, "environ")


def pids(recorder: Recorder) -> dict[str, int]:
    return {event.name: event.pid for event in recorder.events if isinstance(event, Started)}


@pytest.mark.asyncio
async def test_router_is_told_the_nodes_addresses_and_each_process_has_its_own_group() -> None:
    async with running(stub_plan(nodes=("normal", "normal"))) as (supervisor, recorder, _):
        await recorder.seen("ready")
        nodes = {e.name: e.addresses["grpc"] for e in recorder.events if isinstance(e, Started) and e.role == "prefill"}
        told = await recorder.logged("router arguments")
        arguments = json.loads(told.removeprefix("router arguments "))
        given = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--prefill"]
        assert sorted(given) == sorted(nodes.values())
        assert all(os.getpgid(pid) == pid for pid in pids(recorder).values())
        assert supervisor.address == next(
            e.addresses["grpc"] for e in recorder.events if isinstance(e, Started) and e.name == "router"
        )


@pytest.mark.asyncio
async def test_a_secret_is_handed_on_by_descriptor_alone_also_to_a_process_that_is_started_again() -> None:
    told: list[Sequence[str]] = []
    with HandedSecret() as secret:
        async with running(replace(stub_plan(), secret=secret), told.append) as (supervisor, recorder, _):
            await recorder.seen("ready")
            os.kill(pids(recorder)["prefill-0"], signal.SIGKILL)
            await recorder.seen("started", 3)
            for pid in pids(recorder).values():
                assert file_of(pid, f"fd/{secret.fd}") == secret.value
                assert secret.value not in file_of(pid, "cmdline") + file_of(pid, "environ")
            assert len(told[-1]) == 2
            assert supervisor.address in told[-1]
            assert not any(secret.value.decode() in line for line in recorder.logs)


@pytest.mark.asyncio
async def test_drain_stops_the_router_before_the_nodes() -> None:
    async with running(stub_plan()) as (supervisor, recorder, task):
        await recorder.seen("ready")
        task.cancel()
        await asyncio.wait([task])
        assert await supervisor.drain(DEADLINE_S)
        ended = [(event.name, event.status) for event in recorder.events if isinstance(event, Exited)]
        assert ended == [("router", 0), ("prefill-0", 0)]


@pytest.mark.asyncio
async def test_process_that_ends_by_itself_after_the_drain_time_is_not_killed() -> None:
    async with running(stub_plan()) as (supervisor, recorder, task):
        await recorder.seen("ready")
        task.cancel()
        await asyncio.wait([task])
        assert await supervisor.drain(0.0)
        assert [event.status for event in recorder.events if isinstance(event, Exited)] == [0, 0]


@pytest.mark.parametrize(("router", "node"), [("normal", "deaf"), ("deaf", "normal")])
@pytest.mark.asyncio
async def test_process_that_ignores_sigterm_is_killed_alone_when_the_grace_is_over(router: str, node: str) -> None:
    async with running(stub_plan(router, (node,), stop_grace_s=1.0)) as (supervisor, recorder, task):
        await recorder.seen("ready")
        task.cancel()
        await asyncio.wait([task])
        assert not await supervisor.drain(0.0)
        ended = [(event.name, event.status) for event in recorder.events if isinstance(event, Exited)]
        killed = -signal.SIGKILL
        assert ended == [("router", killed if router == "deaf" else 0), ("prefill-0", killed if node == "deaf" else 0)]


@pytest.mark.asyncio
async def test_children_do_not_get_variables_that_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_KV_BLOKS", "7")
    monkeypatch.setenv("PDSERVE_KV_BLOCKS", "8")
    monkeypatch.setenv("PDSERVE_PORT", "9")
    async with running(stub_plan()) as (_, recorder, _task):
        await recorder.seen("ready")
        seen = environment_of(pids(recorder)["router"])
        assert b"PDSERVE_KV_BLOCKS=8" in seen
        assert b"PDSERVE_KV_BLOKS" not in seen
        assert b"PDSERVE_PORT" not in seen


@pytest.mark.asyncio
async def test_process_that_cannot_start_ends_the_cluster_with_its_reason_and_status() -> None:
    async with running(stub_plan(nodes=("normal", "fail-at-start"))) as (_, recorder, task):
        with pytest.raises(ClusterFailed, match=r"prefill-1 failed \(exit status 3\): the model is damaged") as failed:
            await asyncio.wait_for(task, DEADLINE_S)
        assert failed.value.exit_code == 3
        assert [(e.name, e.status) for e in recorder.events if isinstance(e, Exited)] == [("prefill-1", 3)]
        assert "hint: pull it again" in str(failed.value)
        assert not [e for e in recorder.events if isinstance(e, Started) and e.name == "router"]


@pytest.mark.asyncio
async def test_process_that_tells_no_address_is_given_up() -> None:
    async with running(stub_plan(nodes=("mute",), listen_wait_s=0.5)) as (_, _recorder, task):
        with pytest.raises(ClusterFailed, match="prefill-0 told no address"):
            await asyncio.wait_for(task, DEADLINE_S)


@pytest.mark.asyncio
async def test_process_that_dies_starts_again_at_the_same_port() -> None:
    async with running(stub_plan(nodes=("crash-on-connect",))) as (_, recorder, task):
        await recorder.seen("ready")
        connect(recorder)
        await recorder.seen("started", 3)
        runs = [e for e in recorder.events if isinstance(e, Started) and e.role == "prefill"]
        assert runs[0].addresses == runs[1].addresses
        assert runs[0].pid != runs[1].pid
        death = next(e for e in recorder.events if isinstance(e, Exited))
        assert (death.name, death.status) == ("prefill-0", 7)
        assert not task.done()


@pytest.mark.asyncio
async def test_process_that_keeps_dying_ends_the_cluster() -> None:
    plan = stub_plan(nodes=("crash-on-connect",), restarts=RestartPolicy(max_restarts=2, first_delay_s=0.0))
    async with running(plan) as (_, recorder, task):
        await recorder.seen("ready")
        for num_started in (2, 3, 4):
            await recorder.seen("started", num_started)
            connect(recorder)
        with pytest.raises(ClusterFailed, match="died more than 2 times") as failed:
            await asyncio.wait_for(task, DEADLINE_S)
        assert failed.value.exit_code == 7


@pytest.mark.asyncio
async def test_busy_port_is_refused_before_anything_is_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plan = stub_plan()
        busy = ClusterPlan(router=plan.router, nodes=plan.nodes, port=port)
        async with running(busy) as (_, recorder, task):
            with pytest.raises(AddressInUse, match=str(port)):
                await asyncio.wait_for(task, DEADLINE_S)
            assert recorder.events == []


def test_restarts_have_growing_delays_and_a_bound_within_the_window() -> None:
    policy = RestartPolicy(max_restarts=3, window_s=60.0, first_delay_s=0.5, longest_delay_s=1.5)
    assert [policy.next_delay_s(now_s) for now_s in (0.0, 1.0, 2.0, 3.0)] == [0.5, 1.0, 1.5, None]
    assert policy.next_delay_s(61.5) == 1.0


def connect(recorder: Recorder) -> None:
    """Connect to the node, which makes it crash."""
    last = [e for e in recorder.events if isinstance(e, Started) and e.role == "prefill"][-1]
    host, _, port = last.addresses["grpc"].rpartition(":")
    socket.create_connection((host, int(port))).close()


async def supervised(work: Callable[[], Awaitable[None]]) -> tuple[ExitCode, Recorder]:
    """Run a cluster around `work` and return how it ended; no process of it is left."""
    recorder = Recorder()
    supervisor = Supervisor(stub_plan(), recorder, always_ready)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await supervise(supervisor, recorder, 10.0, work), recorder
    finally:
        assert len(pids(recorder)) == 2
        assert not any(is_alive(pid) for pid in pids(recorder).values())


@pytest.mark.asyncio
async def test_cluster_ends_with_its_work() -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    code, recorder = await supervised(work)
    assert code is ExitCode.OK
    assert [event.kind for event in recorder.events][-4:] == ["draining", "exited", "exited", "stopped"]


@pytest.mark.asyncio
async def test_failure_of_the_work_is_raised_when_everything_has_stopped() -> None:
    async def work() -> None:
        raise NoNodes("no decode node")

    with pytest.raises(NoNodes, match="no decode node"):
        await supervised(work)


@pytest.mark.asyncio
async def test_signal_before_the_work_is_done_is_no_success() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    code, _ = await supervised(work)
    assert code is ExitCode.INTERRUPTED


@contextlib.contextmanager
def supervisor_process(
    router: str, node: str, drain_s: float = 30.0
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A supervisor in a process of its own, ready; with the process ids of its children."""
    command = [sys.executable, str(SUPERVISOR), router, node, str(drain_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            started = events_until(process.stdout, "ready")
            yield process, [int(str(event["pid"])) for event in started if event["event"] == "started"]
        finally:
            process.kill()


def events_until(stream: IO[str], kind: str) -> list[dict[str, object]]:
    """Read events up to the first of `kind`."""
    events: list[dict[str, object]] = []
    for line in stream:
        events.append(json.loads(line))
        if events[-1]["event"] == kind:
            return events
    raise AssertionError(f"the supervisor ended before {kind}: {events}")


def wait_gone(pid: int) -> None:
    """Wait for the end of a process that is not a child of ours."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([handle], [], [], DEADLINE_S)
        assert readable, f"process {pid} is still there"
    finally:
        os.close(handle)


def test_killed_supervisor_leaves_no_children() -> None:
    """Failure class 33: orphans held the ports."""
    with supervisor_process("deaf", "deaf") as (process, children):
        assert len(children) == 2
        process.kill()
        process.wait(DEADLINE_S)
        for pid in children:
            wait_gone(pid)


def test_child_whose_parent_is_dead_already_ends_at_once() -> None:
    code = "from pdserve.cli.parent import die_with_parent; die_with_parent(); print('alive')"
    environment = os.environ | {"PDSERVE_PARENT_PID": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_drains(number: signal.Signals) -> None:
    with supervisor_process("normal", "normal") as (process, children):
        process.send_signal(number)
        assert process.stdout is not None
        events = events_until(process.stdout, "stopped")
        assert events[0]["event"] == "draining"
        assert events[-1]["drained"] is True
        assert process.wait(DEADLINE_S) == 0
        assert not any(is_alive(pid) for pid in children)


def test_second_signal_stops_at_once() -> None:
    with supervisor_process("deaf", "normal", drain_s=3600.0) as (process, children):
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        events_until(process.stdout, "draining")
        process.send_signal(signal.SIGINT)
        assert events_until(process.stdout, "stopped")[-1]["drained"] is False
        assert process.wait(DEADLINE_S) == 130
        assert not any(is_alive(pid) for pid in children)


def test_cluster_that_nobody_reads_any_more_drains() -> None:
    """`pdserve up | head` ended the processes by force, with complaints of asyncio's."""
    with supervisor_process("normal", "normal") as (process, children):
        assert process.stdout is not None
        process.stdout.close()
        os.kill(children[0], signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 0
        assert not any(is_alive(pid) for pid in children)
