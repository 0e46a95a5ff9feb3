"""What the router's log says: one line per request that ended, found by its label, and nothing alarming about normal ends."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import IDS, ask, collect, failure, submits
from tests.router.scripted_node import Stage, start_stage, until

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with start_stage(tmp_path, max_attempts=1) as running:
        await running.until("ready", 2)
        yield running
        await running.leak_oracle()


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="pdserve")


def lines(caplog: pytest.LogCaptureFixture, label: str, level: int) -> list[str]:
    """Return the messages of that level that carry the label."""
    return [
        record.getMessage()
        for record in caplog.records
        if getattr(record, "request_id", None) == label and record.levelno == level
    ]


async def serve(stage: Stage, label: str) -> inference_pb2.Summary:
    call = ask(stage, request_id=label)
    submit, _ = await submits(stage)
    stage.prefill[0].first_token(submit, IDS[0])
    stage.decode[0].adopted(submit)
    stage.prefill[0].released(submit)
    stage.decode[0].tokens(submit, 1, IDS[1:4], is_last=True)
    stage.decode[0].released(submit)
    return (await collect(call))[2]


async def test_a_finished_request_has_one_line(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    summary = await serve(stage, "mine")
    (line,) = lines(caplog, "mine", logging.INFO)
    wanted = [
        "request finished: LENGTH;",
        f"prompt_tokens={summary.usage.prompt_tokens} ",
        "completion_tokens=4 ",
        "attempts=1 ",
        f"ttft_ms={summary.timeline.ttft_s * 1e3:.1f} ",
        f"e2el_ms={summary.timeline.e2el_s * 1e3:.1f} ",
        f"prefill={stage.prefill[0].incarnation.hex()[:8]} ",
        f"decode={stage.decode[0].incarnation.hex()[:8]}",
    ]
    assert [part for part in wanted if part not in line] == [], line
    told = [line.partition(":")[0].partition(" on ")[0] for line in lines(caplog, "mine", logging.DEBUG)]
    assert sorted(told) == ["admitted", "adopted", "first token", "placed", "submitted"]
    assert stage.gauges()["served_total"] == 1


async def test_a_failed_request_has_one_line(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    call = ask(stage, request_id="mine")
    submit, _ = await submits(stage)
    stage.decode[0].released(submit, node_pb2.LEG_OUTCOME_FAILED)
    await failure(call)
    stage.prefill[0].released(submit, node_pb2.LEG_OUTCOME_CANCELLED)
    (line,) = lines(caplog, "mine", logging.INFO)
    assert line.startswith("request failed: ATTEMPTS_EXHAUSTED: 1 attempts failed; the last: scripted;")
    assert "completion_tokens=0 attempts=1 ttft_ms=- " in line
    assert lines(caplog, "mine", logging.WARNING) == ["leg FAILED: scripted "]
    assert stage.gauges()["failed_total"] == 1


async def test_a_cancelled_request_has_one_line_and_no_warning(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The nodes tell each other that the client left, and each reports the other's abort as a failure."""
    call = ask(stage, request_id="mine")
    submit, _ = await submits(stage)
    stage.prefill[0].first_token(submit, IDS[0])
    await until(lambda: stage.gauges()["sessions.handing_over"] == 1)
    call.cancel()
    for node in (stage.prefill[0], stage.decode[0]):
        node.released(await node.next_of("cancel"), node_pb2.LEG_OUTCOME_FAILED, "peer_aborted")
    await stage.leak_oracle()
    (line,) = lines(caplog, "mine", logging.INFO)
    assert line.startswith("request cancelled: the client left; ")
    assert "completion_tokens=1 " in line
    assert lines(caplog, "mine", logging.WARNING) == []
    assert sum("peer_aborted" in line for line in lines(caplog, "mine", logging.DEBUG)) == 2
    gauges = stage.gauges()
    assert [gauges[f"{name}_total"] for name in ("served", "failed", "cancelled")] == [0, 0, 1]


async def test_a_refused_request_has_one_line(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    await failure(ask(stage, 5000, request_id="mine"))
    (line,) = lines(caplog, "mine", logging.INFO)
    assert line.startswith("request refused: INVALID_REQUEST: ")
    await failure(ask(stage, request_id="two\nlines"))
    assert lines(caplog, "two\nlines", logging.INFO) == [], "a label that may not stand in a log does not"


async def test_lines_of_nodes_say_the_address_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    await stage.decode[0].attach_anew()
    await stage.until("ready", 2)
    await stage.decode[0].stop()
    await until(lambda: "refused" in stage.node_state(stage.decode[0])[1].lower())
    of_node = [record for record in caplog.records if getattr(record, "peer", "") == stage.decode[0].address]
    assert {record.getMessage() for record in of_node} >= {"decode node attached", "decode node ready"}
    assert [record.getMessage() for record in of_node if stage.decode[0].address in record.getMessage()] == []
    await stage.decode[0].start()
    await stage.until("ready", 2)


async def test_a_router_says_where_it_listens_and_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard: dict[str, Any] = {"host": "0.0.0.0", "advertise": "router.example", "cluster_secret": "a secret of the test"}
    async with start_stage(tmp_path, num_prefill=0, **guard) as stage:
        port = stage.router.server.port
        told = [record.getMessage() for record in caplog.records]
        assert f"listening on 0.0.0.0:{port}, advertised as router.example:{port}" in told
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        (warning,) = [line for line in warnings if "no request can be served" in line]
        assert "no prefill node" in warning
        assert "--prefill HOST:PORT or PDSERVE_PREFILL" in warning


async def test_draining_shows_in_gauges_and_health(stage: Stage) -> None:
    call = ask(stage)
    submit, _ = await submits(stage)
    health = health_pb2_grpc.HealthStub(stage.channel)

    async def state() -> int:
        return int((await health.Check(health_pb2.HealthCheckRequest())).status)

    async def serving() -> bool:
        return bool(await state() == health_pb2.HealthCheckResponse.SERVING)

    async def not_serving() -> bool:
        return bool(await state() == health_pb2.HealthCheckResponse.NOT_SERVING)

    async def draining() -> float:
        view = await stage.stub.GetClusterState(inference_pb2.GetClusterStateRequest())
        return view.gauges["draining"]

    await until(serving)
    assert await draining() == 0
    stage.stop.set()
    await until(not_serving)
    assert await draining() == 1
    call.cancel()
    for node in (stage.prefill[0], stage.decode[0]):
        node.released(submit)
    with pytest.raises(grpc.aio.AioRpcError):
        while True:
            await draining()
