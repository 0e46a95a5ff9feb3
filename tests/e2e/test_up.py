"""`pdserve up` over real services: ready, killed and restarted nodes, drain, and nothing left behind."""

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.client import AsyncClient, Options
from pdserve.core.errors import AddressInUse
from pdserve.rpc.ports import check_port
from tests.e2e.cluster import DEADLINE_S, ROOT, START_S, start_cluster, until
from tests.e2e.tiny_model import expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]


class Up:
    """A running `pdserve up --json`; `events` are the JSON lines it printed so far."""

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.address = f"127.0.0.1:{port}"
        self.events: list[dict[str, Any]] = []

    async def until_event(self, name: str, number: int = 1) -> list[dict[str, Any]]:
        """Read on until `number` events of that name came; all of them."""
        async with asyncio.timeout(START_S):
            while sum(event["event"] == name for event in self.events) < number:
                assert self.process.stdout is not None
                line = await self.process.stdout.readline()
                assert line, f"up ended without {name}: {self.events}"
                self.events.append(json.loads(line))
        return [event for event in self.events if event["event"] == name]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@asynccontextmanager
async def up(model: Path, *options: str) -> AsyncIterator[Up]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["-m", "pdserve.cli", "up", "--json", "--model", str(model), "--port", str(port), *options]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=PIPE)
    try:
        running = Up(process, port)
        await running.until_event("ready")
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answer(address: str, model: Path) -> None:
    """Ask for a short answer and hold it against the oracle."""
    async with AsyncClient(address) as client:
        result = await client.complete("up and running", Options(max_tokens=12))
    assert result.token_ids == expected_tokens(model, prompt_ids("up and running"), 12)[0]


async def test_a_killed_supervisor_leaves_no_children(tiny: Path) -> None:
    """Failure class 33."""
    async with up(tiny) as cluster:
        children = cluster.children()
        assert len(children) == 3
        await answer(cluster.address, tiny)
        cluster.process.kill()
        await cluster.process.wait()

        async def gone() -> bool:
            return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)

        async def is_free() -> bool:
            try:
                check_port("127.0.0.1", int(cluster.address.rpartition(":")[2]), "--port")
            except AddressInUse:
                return False
            return True

        await until(gone, "the children are gone")
        await until(is_free, "the port is free")


async def test_a_killed_node_is_restarted_and_the_first_signal_drains(tiny: Path) -> None:
    async with up(tiny) as cluster:
        await answer(cluster.address, tiny)
        started = await cluster.until_event("started", 3)
        [decode] = [event for event in started if "decode" in str(event["name"])]
        os.kill(int(decode["pid"]), signal.SIGKILL)
        await cluster.until_event("restarting")
        await cluster.until_event("started", 4)
        async with AsyncClient(cluster.address) as client:

            async def ready() -> bool:
                return all(node.state == "ready" for node in (await client.cluster_state()).nodes)

            await until(ready, "the node is back", START_S)
        await answer(cluster.address, tiny)
        cluster.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await cluster.process.wait() == 0


async def test_a_busy_port_is_named_before_anything_starts(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["-m", "pdserve.cli", "up", "--model", str(tiny), "--port", str(port)]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=PIPE, stderr=PIPE)
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
    assert process.returncode == 5
    assert str(port) in (out + err).decode()


async def test_a_decode_address_given_as_prefill_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    async with start_cluster(tiny, tmp_path) as cluster:
        prefill, decode = (cluster.nodes[name].grpc for name in ("prefill0", "decode0"))
        await cluster.client.close()
        cluster.router.kill(signal.SIGTERM)
        cluster.router.popen.wait(DEADLINE_S)
        cluster.nodes["prefill0"].grpc, cluster.nodes["decode0"].grpc = decode, prefill
        cluster.start_router()

        async def refused() -> bool:
            nodes = (await cluster.client.cluster_state()).nodes
            return [node.state for node in nodes] == ["refused", "refused"]

        await until(refused, "both nodes are refused")
        reasons = [node.reason for node in (await cluster.client.cluster_state()).nodes]
        assert all("prefill" in reason and "decode" in reason for reason in reasons), reasons
