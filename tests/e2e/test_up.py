"""`pdserve up` over real services: ready, killed and restarted nodes, drain, and nothing left behind."""

import asyncio
import json
import os
import signal
import socket
import stat
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pdserve.client import AsyncClient, Options
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import AddressInUse
from pdserve.core.run_secret import find
from pdserve.rpc.options import channel_options
from pdserve.rpc.ports import check_port
from pdserve.rpc.tickets import ticket_metadata
from pdserve.v1 import node_pb2, node_pb2_grpc
from tests.e2e.cluster import DEADLINE_S, ROOT, START_S, start_cluster, start_process, until
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
        assert find([cluster.address]).run is None, "what is left of the run is no secret of anybody"


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


def assert_hidden(secret: bytes, processes: list[psutil.Process]) -> None:
    """Neither command line nor environment shows the secret to anybody."""
    for process in processes:
        for what in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{process.pid}/{what}").read_bytes(), (process, what)


async def get_state(address: str, secret: ClusterSecret | None) -> node_pb2.GetStateResponse:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        ticket = await ticket_metadata(stub, secret, "GetState", DEADLINE_S)
        return await stub.GetState(node_pb2.GetStateRequest(), timeout=DEADLINE_S, metadata=ticket)


async def test_a_cluster_makes_a_secret_of_its_own_that_only_its_user_finds(tiny: Path, tmp_path: Path) -> None:
    """Without one a local user could attach to its nodes, name an address of his, and have other users' KV sent there."""
    async with up(tiny) as cluster:
        started = await cluster.until_event("started", 3)
        addresses = {str(event["role"]): str(event["addresses"]["grpc"]) for event in started}
        run = find([]).run
        assert run is not None
        assert run.addresses == set(addresses.values())
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o600
        secret = run.secret.proving
        assert len(secret) == 64
        assert_hidden(secret, [psutil.Process(cluster.process.pid), *cluster.children()])
        await get_state(addresses["decode"], run.secret)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await get_state(addresses["decode"], None)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        [decode] = [event for event in started if event["role"] == "decode"]
        os.kill(int(decode["pid"]), signal.SIGKILL)
        await cluster.until_event("started", 4)
        assert_hidden(secret, cluster.children())
        # Two processes that the same user starts by hand: a node, and a router over the old and the new node.
        node = start_process("by-hand", ["decode", "--model", str(tiny), "--port", "0"], tmp_path)
        pool = ["--prefill", addresses["prefill"], "--decode", f"{addresses['decode']},{node.grpc}"]
        router = start_process("router", ["router", "--model", str(tiny), "--port", "0", *pool], tmp_path)
        try:
            async with AsyncClient(router.grpc) as client:

                async def ready() -> bool:
                    nodes = (await client.cluster_state()).nodes
                    return [node.state for node in nodes] == ["ready"] * 3

                await until(ready, "all three nodes are ready", START_S)
            for address in (cluster.address, router.grpc):
                await answer(address, tiny)
        finally:
            router.kill()
            node.kill()
        assert not any(secret.decode() in json.dumps(event) for event in cluster.events)
        cluster.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await cluster.process.wait()
        assert not run.path.exists()


async def test_a_cluster_with_a_configured_secret_makes_none(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("the configured secret of the test")
    async with up(tiny, "--set", f"cluster_secret_file={file}") as cluster:
        assert find([cluster.address]).run is None
        started = await cluster.until_event("started", 3)
        [decode] = [str(event["addresses"]["grpc"]) for event in started if event["role"] == "decode"]
        await get_state(decode, ClusterSecret(b"the configured secret of the test"))
        await answer(cluster.address, tiny)


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
