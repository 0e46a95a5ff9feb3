"""Real router, prefill and decode processes on loopback, and the two oracles that close every test on them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.client import Answer, AsyncClient, Options, Tls
from pdserve.client.cluster import ClusterState
from pdserve.client.request import Prompt
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.rpc.options import channel_options
from pdserve.rpc.tickets import ticket_metadata
from pdserve.rpc.tls import open_async_channel
from pdserve.v1 import node_pb2, node_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
START_S = 120.0
ANSWER_S = 120.0
POLL_S = 0.01

LEAK_GAUGES = (
    "legs",
    "held",
    "outbox_bytes",
    "blocks.used",
    "blocks.reserved",
    "kv_transfers",
    "kv_parked_opens",
    "kv_frames_in_sockets",
    "kv_staging_bytes",
    "bound_transfers",
    "constraints",
    "grammars.waiting",
)
"""Gauges of a node that are zero when nothing is under way."""
ROUTER_LEAK_GAUGES = ("sessions", "admitted", "waiting", "legs", "mailbox", "clients", "violations")
"""The same of a router, by prefix."""


NEVER = ("kv_io_errors_total", "failed_steps", "violations")
"""Gauges that must stay zero."""
GROWS = (
    "steps",
    "forwards",
    "failed_steps",
    "process.resident_bytes",
    "process.cpu_s",
    "process.threads",
    "blocks.free",
    "grammars.kept",
)
"""Gauges that need not come back: they only grow, fill up, or say how much is left. (Threads are made at first use and kept.)"""
SLACK = {"process.descriptors": 8}
"""Connections of the test's own calls come and go; 8 is far below one per request."""


def is_watched(gauge: str) -> bool:
    """Whether a gauge has to come back to where it began."""
    return not gauge.endswith("_total") and gauge not in GROWS and not gauge.startswith("nodes.")


@dataclass
class Process:
    """One service process. `grpc` is HOST:PORT; so are `http`, which only a router has, and `admin`, where one was asked for."""

    name: str
    arguments: list[str]
    log: Path
    popen: "subprocess.Popen[bytes]"
    grpc: str
    http: str = ""
    admin: str = ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; with SIGKILL wait until the process is gone."""
        self.popen.send_signal(number)
        if number == signal.SIGKILL:
            self.popen.wait(DEADLINE_S)

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None


@dataclass
class Cluster:
    """A running cluster. Made by `start_cluster`."""

    model: str
    folder: Path
    secret: ClusterSecret | None = None
    tls: Tls | None = None
    """How the test calls the router and the nodes."""
    api_key: str | None = None
    """What `client` sends."""
    router: Process = field(init=False)
    nodes: dict[str, Process] = field(default_factory=dict)
    client: AsyncClient = field(init=False)
    baseline: dict[str, dict[str, float]] = field(default_factory=dict)
    """Gauges of each process when the cluster was new, or when the process was first seen at rest."""

    async def node_state(self, name: str) -> node_pb2.GetStateResponse:
        """Ask a node for its debug dump."""
        tls = None if self.tls is None else self.tls.material()
        async with open_async_channel(self.nodes[name].grpc, tls, channel_options()) as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            ticket = await ticket_metadata(stub, self.secret, "GetState", DEADLINE_S)
            return await stub.GetState(node_pb2.GetStateRequest(), timeout=DEADLINE_S, metadata=ticket)

    async def gauge(self, node: str, name: str) -> float:
        """Return one gauge of a node."""
        return (await self.node_state(node)).gauges[name]

    async def answer(self, prompt: Prompt, options: Options | None = None) -> Answer:
        """Stream a whole answer; one that does not end is told with what the cluster says of it."""
        answer = Answer()

        async def read() -> None:
            async for part in self.client.generate(prompt, options):
                answer.add(part)

        reading = asyncio.ensure_future(read())
        try:
            async with asyncio.timeout(ANSWER_S):
                await reading
        except TimeoutError:
            if not reading.cancelled():
                raise
            pytest.fail(f"no end after {len(answer.token_ids)} tokens within {ANSWER_S:g} s: {await self.leaks()}")
        return answer

    async def until_held(self, node: str, number: int = 1) -> None:
        """Wait until `number` requests stand at the node's hold."""

        async def held() -> bool:
            return await self.gauge(node, "held") >= number

        await until(held, f"{number} requests held at {node}")

    async def until_ready(self, num_nodes: int) -> None:
        """Wait until the router sees that many ready nodes, and all their handshakes."""

        async def ready() -> bool:
            state = await self.client.cluster_state()
            return sum(node.state == "ready" for node in state.nodes) >= num_nodes

        await until(ready, f"{num_nodes} nodes are ready", START_S)

    async def state(self) -> ClusterState:
        """Return the router's view."""
        return await self.client.cluster_state()

    async def gauges(self) -> dict[str, dict[str, float]]:
        """Return every gauge of the router and of every living node, by incarnation."""
        state = await self.client.cluster_state()
        found = {state.router.incarnation.hex(): dict(state.gauges)}
        for name, process in self.nodes.items():
            if process.is_alive:
                node = await self.node_state(name)
                found[node.process.incarnation] = dict(node.gauges)
        return found

    async def leak_oracle(self) -> None:
        """Wait until nothing is under way anywhere, and fail by name on what stays."""
        left: list[str] = []

        async def clean() -> bool:
            left[:] = await self.leaks()
            return not left

        try:
            await until(clean, "nothing is under way")
        except AssertionError:
            pytest.fail("leaked: " + "; ".join(left))

    async def leaks(self) -> list[str]:
        left = []
        for name, process in self.nodes.items():
            if not process.is_alive:
                continue
            state = await self.node_state(name)
            gauges = dict(state.gauges)
            left += [f"{name}: {violation}" for violation in state.violations]
            left += [f"{name}: {gauge} = {gauges[gauge]:g}" for gauge in LEAK_GAUGES if gauges.get(gauge, 0) != 0]
            if gauges["blocks.free"] + gauges["blocks.cached"] != gauges["blocks.total"]:
                left.append(f"{name}: {gauges['blocks.free']:g} of {gauges['blocks.total']:g} blocks are free")
        state_of_router = await self.client.cluster_state()
        left += [f"router: session {session}" for session in state_of_router.sessions]
        left += [
            f"router: {name} = {value:g}"
            for name, value in state_of_router.gauges.items()
            if name.startswith(ROUTER_LEAK_GAUGES) and not name.endswith("_total") and value != 0
        ]
        for incarnation, gauges in (await self.gauges()).items():
            first = self.baseline.setdefault(incarnation, gauges)
            left += [
                f"{incarnation[:8]}: {name} = {value:g}, {first[name]:g} at first"
                for name, value in gauges.items()
                if is_watched(name) and value > first[name] + SLACK.get(name, 0)
            ]
            left += [f"{incarnation[:8]}: {name} = {gauges[name]:g}" for name in NEVER if gauges.get(name, 0) != 0]
        return left

    def logs(self) -> str:
        """Return the end of every process's log."""
        parts = []
        for process in (*self.nodes.values(), self.router):
            tail = process.log.read_text(errors="replace").splitlines()[-40:]
            parts.append(f"--- {process.name} (exit {process.popen.poll()})\n" + "\n".join(tail))
        return "\n".join(parts)

    def start_node(self, role: str, name: str, *options: str, port: int = 0) -> Process:
        """Start a prefill or decode node and return once it is bound."""
        arguments = [role, "--model", self.model, "--port", str(port), *options]
        self.nodes[name] = start_process(name, arguments, self.folder)
        return self.nodes[name]

    def start_router(self, *options: str) -> None:
        """Start the router over all nodes that run now."""
        arguments = ["router", "--model", self.model, "--port", "0", *options]
        for process in self.nodes.values():
            arguments += [f"--{process.arguments[0]}", process.grpc]
        self.router = start_process("router", arguments, self.folder)
        self.client = AsyncClient(self.router.grpc, tls=self.tls, api_key=self.api_key)

    async def stop(self) -> None:
        """Stop everything; whatever does not stop by itself is killed."""
        await self.client.close()
        processes = [self.router, *self.nodes.values()]
        for process in processes:
            if process.is_alive:
                process.kill(signal.SIGTERM)
        ends_s = time.monotonic() + 10
        for process in processes:
            try:
                process.popen.wait(max(0.1, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def start_process(name: str, arguments: list[str], folder: Path) -> Process:
    """Start `pdserve ARGUMENTS` and return once it told the addresses that it is bound to."""
    log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)[1])
    reader, writer = os.pipe()
    own = {"PDSERVE_TEST": "1", "PDSERVE_PARENT_PID": str(os.getpid()), "PDSERVE_HTTP_PORT": "0"}
    environment = os.environ | own
    with log.open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", "pdserve.cli", *arguments, "--ready-fd", str(writer), "--drain-s", "2"],
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(writer,),
            cwd=ROOT,
        )
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        line = pipe.readline()
    if not line:
        popen.wait(DEADLINE_S)
        pytest.fail(f"{name} did not start (exit {popen.returncode}):\n{log.read_text(errors='replace')[-3000:]}")
    addresses = json.loads(line)
    return Process(
        name, arguments, log, popen, addresses["grpc"], addresses.get("http", ""), addresses.get("admin", "")
    )


@asynccontextmanager
async def start_cluster(
    model: str | Path,
    folder: Path,
    *,
    prefill: tuple[tuple[str, ...], ...] = ((),),
    decode: tuple[tuple[str, ...], ...] = ((),),
    router: tuple[str, ...] = (),
    secret: str | None = None,
    tls: Tls | None = None,
    api_key: str | None = None,
    is_told: bool = True,
) -> AsyncIterator[Cluster]:
    """Run a cluster: one process per tuple of options. Ready when entered; everything is gone when left.

    With `is_told` false the options say themselves where the secret comes from.
    """
    cluster = Cluster(str(model), folder, None if secret is None else ClusterSecret(secret.encode()), tls, api_key)
    guard = ("--cluster-secret", secret) if secret is not None and is_told else ()
    try:
        for number, options in enumerate(prefill):
            cluster.start_node("prefill", f"prefill{number}", *options, *guard)
        for number, options in enumerate(decode):
            cluster.start_node("decode", f"decode{number}", *options, *guard)
        cluster.start_router(*router, *guard)
        await cluster.until_ready(len(prefill) + len(decode))
        cluster.baseline = await cluster.gauges()
        yield cluster
    except BaseException:
        if hasattr(cluster, "router"):
            print(cluster.logs())  # noqa: T201 - pytest shows it with the failure
        raise
    finally:
        if hasattr(cluster, "router"):
            await cluster.stop()
        for process in cluster.nodes.values():
            if process.is_alive:
                process.kill()


async def first_of(tasks: "list[asyncio.Task[Answer]]") -> None:
    """Wait until one of the answers ended."""
    ended, _ = await asyncio.wait(tasks, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
    assert ended, f"none of {len(tasks)} answers ended within {ANSWER_S:g} s: are all at the held node?"


async def until(holds: Callable[[], Awaitable[bool]], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `holds`, and print how long it took; fail by name after the deadline."""
    began_s = time.monotonic()
    while not await holds():
        if time.monotonic() - began_s > deadline_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        await asyncio.sleep(POLL_S)
    print(f"{what}: after {time.monotonic() - began_s:.3f} s")  # noqa: T201 - the record of the run
