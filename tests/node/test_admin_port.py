"""The admin port of a node: its gauges for Prometheus, its readiness, and the debug dump, from loading to work."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.clock import SystemClock
from pdserve.core.ids import Incarnation
from pdserve.core.node_settings import DecodeSettings
from pdserve.core.settings import load_settings
from pdserve.node.admin import NodeViews
from pdserve.node.attach import StreamSettings
from pdserve.node.service import NodeServicer
from pdserve.rpc.admin_port import admin_port
from pdserve.rpc.process_gauges import process_gauges
from tests.node.scripted_desk import ScriptedDesk
from tests.node.works import DECODE

pytestmark = pytest.mark.asyncio
DEADLINE_S = 20.0


class LoadedDesk(ScriptedDesk):
    """A desk with something to tell."""

    def gauges(self) -> dict[str, float]:
        return {"blocks.total": 8.0, "decode.running": 2.0, "kv_failed_total": 1.0}

    def describe(self) -> dict[str, object]:
        return {"blocks": {"leases": {DECODE: 1}.values()}}

    def check_invariants(self) -> list[str]:
        return ["a block is lost"]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[NodeServicer, NodeViews, httpx.AsyncClient]]:
    servicer = NodeServicer(StreamSettings(3.0, 0.5, 16), None, SystemClock())
    views = NodeViews(servicer)
    settings = load_settings(DecodeSettings, {"model": "tiny", "admin_port": "0"})
    async with (
        admin_port(settings, views) as announced,
        httpx.AsyncClient(base_url=f"http://{announced['admin']}", timeout=DEADLINE_S) as client,
    ):
        yield servicer, views, client


async def test_while_the_model_is_loaded_it_says_so() -> None:
    async with served() as (_, _, client):
        health = await client.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "the node is loading its model")
        assert "pdserve_node_legs 0.0" in (await client.get("/metrics")).text
        assert (await client.get("/debug/state")).json()["gauges"]["legs"] == 0


async def test_a_node_at_work_tells_gauges_and_machines() -> None:
    async with served() as (servicer, views, client):
        process = ProcessInfo(Role.DECODE, Incarnation(DECODE), "0", "test", "float32", 1, 16)
        servicer.open_for_work(LoadedDesk(servicer.legs), process, process_gauges)
        views.fault = lambda: ""
        assert (await client.get("/health")).json() == {"status": "ready"}
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        kinds = {family.name: family.type for family in text_string_to_metric_families(response.text)}
        assert kinds["pdserve_node_decode_running"] == "gauge"
        assert kinds["pdserve_node_kv_failed"] == "counter"
        assert "pdserve_node_process_resident_bytes" in kinds
        state = (await client.get("/debug/state")).json()
        assert (state["process"]["role"], state["process"]["incarnation"]) == ("decode", DECODE.hex())
        assert state["violations"] == ["a block is lost"]
        assert state["machines"].keys() == {"legs", "blocks"}
        for path in ("/", "/load", "/v1/models"):
            assert (await client.get(path)).status_code == 404


async def test_off_means_none() -> None:
    views = NodeViews(NodeServicer(StreamSettings(3.0, 0.5, 16), None, SystemClock()))
    async with admin_port(load_settings(DecodeSettings, {"model": "tiny"}), views) as announced:
        assert announced == {}
