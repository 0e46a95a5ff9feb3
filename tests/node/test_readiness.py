"""Failure class 27: a node whose transfers fail turns not-ready, says why, and is tried again."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve import kvtransfer as kv
from pdserve.core.build import ProcessInfo, Role
from pdserve.core.clock import SystemClock
from pdserve.core.ids import Incarnation
from pdserve.core.node_settings import PrefillSettings
from pdserve.core.settings import load_settings
from pdserve.node import process
from pdserve.node.admin import NodeViews
from pdserve.node.attach import StreamSettings
from pdserve.node.service import NodeServicer
from pdserve.node.transfer_record import FAILURES_IN_A_ROW, FORGET_S, SAYS_NOTHING, TOGETHER_S, TransferRecord
from pdserve.rpc.server import GrpcServer
from pdserve.rpc.stops import StopSignals
from tests.node.pair import Node, pair
from tests.node.scripted_desk import ScriptedDesk
from tests.node.works import DECODE, PREFILL, transfer

READY, NOT_READY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
DEADLINE_S = 20.0
CHECKSUM = "kv_nack_checksum"


class TestTransferRecord:
    def test_some_failures_in_a_row_are_a_fault_with_a_name(self) -> None:
        record, faults = TransferRecord(), []
        for number in range(FAILURES_IN_A_ROW):
            record.failed(CHECKSUM, number * TOGETHER_S)
            faults.append(record.fault(number * TOGETHER_S))
        assert faults[:-1] == [""] * (FAILURES_IN_A_ROW - 1)
        assert CHECKSUM in faults[-1]

    def test_one_that_works_clears_it(self) -> None:
        record = failing_record()
        record.worked()
        record.failed(CHECKSUM, 101.0)
        assert record.fault(101.0) == ""

    def test_a_lost_peer_is_one_failure_however_many_transfers_it_takes_along(self) -> None:
        record = TransferRecord()
        for number in range(64):
            record.failed("peer_lost", 5.0 + number * TOGETHER_S / 65)
        assert record.fault(6.0) == ""

    def test_ends_that_say_nothing_of_the_path_do_not_count(self) -> None:
        record = TransferRecord()
        for number, reason in enumerate([*SAYS_NOTHING] * 3):
            record.failed(reason, number * TOGETHER_S)
        assert record.fault(0.0) == ""

    def test_it_is_forgotten_and_then_counts_from_the_start(self) -> None:
        """A mark that only a success could take away would stay for good: nobody sends work to a node that is not ready."""
        record = failing_record()
        assert record.fault(100.0 + FORGET_S) != ""
        assert record.fault(100.1 + FORGET_S) == ""
        record.failed(CHECKSUM, 101.0 + FORGET_S)
        assert record.fault(101.0 + FORGET_S) == ""


def failing_record() -> TransferRecord:
    """A record with a fault, the last failure at 100 s."""
    record = TransferRecord()
    for number in range(FAILURES_IN_A_ROW):
        record.failed(CHECKSUM, 100.0 - (FAILURES_IN_A_ROW - 1 - number) * TOGETHER_S)
    return record


@dataclass
class HeldClock:
    """A clock that stands still."""

    time_s: float = 1000.0

    def now_s(self) -> float:
        return self.time_s


async def fail_in_a_row(node: Node, failed: kv.SendFailed | kv.ReceiveFailed, clock: HeldClock) -> str:
    """Tell a desk of failures, each at a time of its own, and return what it says of its transfers."""
    for _ in range(FAILURES_IN_A_ROW):
        clock.time_s += TOGETHER_S
        node.desk._on_corridor(failed)  # type: ignore[arg-type]  # each desk is given its own end's
    return node.desk.transfer_fault()


@pytest.mark.asyncio
async def test_both_desks_watch_their_transfers() -> None:
    async with pair() as nodes:
        ends: list[tuple[Node, kv.SendFailed | kv.ReceiveFailed, kv.Acked | kv.Received]] = [
            (nodes.prefill, kv.SendFailed(transfer(9), CHECKSUM), kv.Acked(transfer(9), kv.TransferStats())),
            (nodes.decode, kv.ReceiveFailed(transfer(9), CHECKSUM), kv.Received(transfer(9), ())),
        ]
        for node, failed, worked in ends:
            clock = node.desk._clock = HeldClock()
            assert await fail_in_a_row(node, type(failed)(transfer(9), "kv_nack_busy", busy=True), clock) == ""
            assert CHECKSUM in await fail_in_a_row(node, failed, clock)
            node.desk._on_corridor(worked)  # type: ignore[arg-type]  # as above
            assert node.desk.transfer_fault() == ""


@pytest.mark.asyncio
async def test_refused_handshake_is_told_by_both_nodes(caplog: pytest.LogCaptureFixture) -> None:
    """Two nodes that can never be linked stood side by side, and no log said why."""
    async with pair() as nodes:
        for node, peer in ((nodes.prefill, DECODE), (nodes.decode, PREFILL)):
            caplog.clear()
            node.desk._on_corridor(kv.PeerRefused(Incarnation(peer), ("kv_dtype", "wire_dtypes"), "int8 is not plain"))
            (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert record.getMessage().endswith("this node: kv_dtype, wire_dtypes (int8 is not plain)")
            assert record.__dict__["peer"] == peer.hex()[:8]


@asynccontextmanager
async def ticking(desk: ScriptedDesk, servicer: NodeServicer) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the health of a node over `desk` at a quick tick."""
    settings, clock = load_settings(PrefillSettings, {"model": "tiny"}), SystemClock()
    server, info = GrpcServer("127.0.0.1", 0), ProcessInfo(Role.PREFILL, Incarnation(PREFILL), "0", "test")
    await server.start()
    node = process._Node(settings, server, servicer, NodeViews(servicer), desk, info, StopSignals(), clock)
    ticks = asyncio.create_task(node._tick())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
    finally:
        ticks.cancel()
        await asyncio.wait({ticks})
        await server.stop(0)


@pytest.mark.asyncio
async def test_health_follows_peers_and_transfers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "TICK_S", 0.01)
    servicer = NodeServicer(StreamSettings(10.0, 1.0, 4), None, SystemClock())
    desk = ScriptedDesk(servicer.legs)
    caplog.set_level(logging.INFO, "pdserve.node.process")
    async with ticking(desk, servicer) as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        async def becomes(state: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                assert (await states.read()).status == state

        await becomes(NOT_READY)
        desk.connected = (Incarnation(DECODE),)
        await becomes(READY)
        desk.fault_of_transfers = "transfers failed"
        await becomes(NOT_READY)
        desk.fault_of_transfers = ""
        await becomes(READY)
        desk.connected = ()
        await becomes(NOT_READY)
        states.cancel()
    said = [record.getMessage() for record in caplog.records if record.name == "pdserve.node.process"]
    assert said == ["ready", "not ready: transfers failed", "ready", "not ready: no peer can be transferred to"]
