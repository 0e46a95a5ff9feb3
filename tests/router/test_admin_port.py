"""The admin port of a router: everything for operators, without a key, where the operator chose to listen."""

import asyncio
import logging
import socket
from pathlib import Path

import httpx
import pytest

from pdserve.core.clock import SystemClock
from pdserve.core.errors import AddressInUse
from pdserve.core.router_settings import RouterSettings
from pdserve.core.settings import load_settings
from pdserve.router.server import Router
from pdserve.rpc import http_listener
from pdserve.v1 import node_pb2
from tests.router.client_calls import IDS, ask, bearer, submits
from tests.router.http_calls import adopted
from tests.router.models import write_model_folder
from tests.router.scripted_node import DEADLINE_S, start_stage, until

pytestmark = pytest.mark.asyncio
KEY = "key-of-the-operator"


def port_told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [line for line in caplog.messages if line.startswith("admin port on ")]
    return line.removeprefix("admin port on ")


async def test_it_shows_all_without_a_key_and_serves_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start_stage(tmp_path, http_port="0", api_key=KEY, admin_port="0") as stage:
        await stage.until("ready", 2)
        call = ask(stage, key=KEY, request_id="label")
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        await adopted(stage, submit)
        assert stage.router.http is not None
        address = f"http://127.0.0.1:{stage.router.http.port}"
        peers = [stage.prefill[0].incarnation]
        stage.decode[0].say(status=node_pb2.NodeStatus(num_running=1, num_free_blocks=98, connected_peers=peers))
        await until(lambda: [load.num_waiting for load in stage.router.membership.loads()][-1] == 0)
        async with (
            httpx.AsyncClient(base_url=port_told(caplog), timeout=DEADLINE_S) as admin,
            httpx.AsyncClient(base_url=address, headers=dict(bearer(KEY)), timeout=DEADLINE_S) as front,
        ):
            assert "pdserve_router_sessions 1.0" in (await admin.get("/metrics")).text
            assert (await admin.get("/health")).json() == {"status": "ready"}
            state = (await admin.get("/debug/state")).json()
            assert [node["address"] for node in state["nodes"]] == [stage.prefill[0].address, stage.decode[0].address]
            assert [session["request_id"] for session in state["sessions"]] == ["label"]
            assert state["router"]["incarnation"] == stage.router.process.incarnation.hex()
            load = (await admin.get("/load")).json()
            assert load["sessions"] == {"open": 1, "waiting": 0}
            assert (load["ready"], load["draining"]) == (True, False)
            assert load["pools"]["decode"] == {
                "nodes": 1,
                "usable": 1,
                "running": 1,
                "waiting": 0,
                "waiting_tokens": 0,
                "blocks": 100,
                "free_blocks": 98,
            }
            for path in ("/load", "/debug/state"):
                assert (await front.get(path)).json().keys() == (await admin.get(path)).json().keys()
            assert (await admin.post("/v1/completions", json={})).status_code == 404
            assert (await admin.get("/v1/models")).status_code == 404
            await stage.decode[0].stop()
            await stage.until("down", 1)
            health = await admin.get("/health")
            assert (health.status_code, stage.decode[0].address in health.text) == (503, True)
        stage.prefill[0].released(submit)
        call.cancel()


async def test_there_is_none_unless_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with start_stage(tmp_path):
        assert not [line for line in caplog.messages if "admin" in line]


@pytest.mark.parametrize("is_late", [False, True], ids=["seen", "taken just then"])
async def test_a_taken_port_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    if is_late:
        monkeypatch.setattr(http_listener, "check_port", lambda *_: None)
    model = write_model_folder(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = {"port": 0, "http_port": "0", "model": str(model), "admin_port": port}
        router = Router(load_settings(RouterSettings, given), SystemClock())
        with pytest.raises(AddressInUse, match="--admin-port"):
            await router.run(*[_never()] * 2)
    assert router.http is not None
    with socket.socket() as again:
        again.bind(("127.0.0.1", router.http.port))


async def test_off_loopback_it_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with start_stage(tmp_path, admin_port="0", admin_host="127.0.0.2"):
        assert "whoever reaches the admin port sees" in caplog.text


def _never() -> "asyncio.Event":
    return asyncio.Event()
