"""What clients that read nothing cost the router's process, seen from outside: at most twice the setting for each of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from pdserve.core.build import Role
from pdserve.v1 import inference_pb2, node_pb2
from tests.e2e.cluster import Process, start_process
from tests.router.client_calls import IDS
from tests.router.models import write_model_folder
from tests.router.scripted_node import ScriptedNode, digest_of, until
from tests.router.test_unread import GENERATE, LENGTH, NUM_TOP, STEP, question, tokens
from tests.rpc.wire import Wire, connect

pytestmark = pytest.mark.asyncio

NUM_CLIENTS = 8
N = 16
MIB = 1 << 20
SLACK = 8 * MIB
"""For a process that meets so much work for the first time: allocators keep what passes through, whoever reads."""


@contextlib.asynccontextmanager
async def real_router(folder: Path) -> AsyncIterator[tuple[Process, ScriptedNode, ScriptedNode]]:
    """A router's process between scripted nodes."""
    model = write_model_folder(folder / "model")
    nodes = [
        await ScriptedNode(role, digest_of(model), max_model_len=LENGTH, num_blocks=LENGTH, lease_s=60.0).start()
        for role in (Role.PREFILL, Role.DECODE)
    ]
    prefill, decode = nodes
    options = ["--port", "0", "--max-unread-s", "120", "--lease-s", "60"]
    arguments = ["router", "--model", str(model), "--prefill", prefill.address, "--decode", decode.address, *options]
    router = await asyncio.to_thread(start_process, "router", arguments, folder)
    try:
        yield router, prefill, decode
    finally:
        router.popen.terminate()
        await asyncio.to_thread(router.popen.wait, 30)
        for node in nodes:
            await node.stop()


async def begin(prefill: ScriptedNode, decode: ScriptedNode) -> node_pb2.Submit:
    submit: node_pb2.Submit = await decode.next_of("submit")
    prefill.first_tokens(submit, IDS[:1] * N)
    prefill.released(submit)
    decode.adopted(submit)
    return submit


async def fill(decode: ScriptedNode, submits: list[node_pb2.Submit]) -> None:
    """Make tokens for all of them until each is cancelled."""
    index, running = 1, {submit.session_id: submit for submit in submits}
    while running:
        assert index < LENGTH // 2, "the router took it all"
        for submit in running.values():
            decode.step(tokens=[tokens(submit, sequence, index) for sequence in range(N)])
        index += STEP
        await until(lambda: decode.has_spoken)
        while not decode.heard.empty():
            heard = decode.heard.get_nowait()
            if heard.WhichOneof("message") == "cancel":
                decode.released(heard.cancel, node_pb2.LEG_OUTCOME_CANCELLED)
                del running[heard.cancel.session_id]


def resident(router: Process) -> int:
    return int(psutil.Process(router.popen.pid).memory_info().rss)


async def silent_wave(router: Process, prefill: ScriptedNode, decode: ScriptedNode) -> int:
    """Let clients ask for as much as they can get, and read none of it. Return what the process takes with all of them there."""
    port = int(router.grpc.rpartition(":")[2])
    async with contextlib.AsyncExitStack() as stack:
        wires: list[tuple[Wire, int]] = []
        for _ in range(NUM_CLIENTS):
            wire = await stack.enter_async_context(connect(port, 65_535))
            wires.append((wire, wire.call(GENERATE, question(N, NUM_TOP))))
        submits = [await begin(prefill, decode) for _ in wires]
        await fill(decode, submits)
        assert not any(wire.streams[number].is_ended for wire, number in wires), "they are all there"
        return resident(router)


async def one_answer(router: Process, prefill: ScriptedNode, decode: ScriptedNode) -> None:
    """Warm the process up with a client that reads."""
    async with connect(int(router.grpc.rpartition(":")[2]), 1 << 30) as wire:
        wire.grant(0, 1 << 30)
        number = wire.call(GENERATE, question(N, NUM_TOP))
        submit = await begin(prefill, decode)

        def has_come(least: int) -> bool:
            return len(wire.streams[number].data) > least

        for turn in range(40):
            decode.step(tokens=[tokens(submit, sequence, 1 + STEP * turn) for sequence in range(N)])
            least = (turn + 1) * N * STEP * 100  # it keeps up: a token with its likely ones takes more than 100 bytes
            await wire.until(partial(has_come, least))
        for sequence in range(N):
            last = tokens(submit, sequence, 1 + 40 * STEP)
            last.finish_reason = inference_pb2.FINISH_REASON_LENGTH
            decode.step(tokens=[last])
        decode.released(submit)
        await wire.until(lambda: wire.streams[number].ended_with(0))


async def test_each_costs_at_most_twice_the_setting(tmp_path: Path) -> None:
    """Four of them cost 61 MiB where the setting said 1 MiB each."""
    async with real_router(tmp_path) as (router, prefill, decode):
        await until(lambda: prefill.num_beats and decode.num_beats)
        await one_answer(router, prefill, decode)
        before = resident(router)
        first = await silent_wave(router, prefill, decode)
        second = await silent_wave(router, prefill, decode)
        print(f"before {before / MIB:.1f}, first {first / MIB:.1f}, second {second / MIB:.1f} MiB")  # noqa: T201
        assert first - before <= 2 * MIB * NUM_CLIENTS + SLACK
        assert second - first <= SLACK, "what one wave left, the next one uses"
