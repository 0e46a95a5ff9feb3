"""Who may do what: one table of callers against every method and path of both fronts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import httpx
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool
from starlette.applications import Starlette
from starlette.routing import Route

from pdserve.core.api_keys import operator_key
from pdserve.router.access import GRPC_ACCESS, HTTP_ACCESS, Access
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from tests.router.client_calls import bearer
from tests.router.http_calls import COMPLETIONS, body_of
from tests.router.scripted_node import DEADLINE_S, Stage, start_stage

pytestmark = pytest.mark.asyncio
USE, OPERATE, OPTION, SECRET = (
    "key-of-ann-to-use-it",
    "key-of-the-operator",
    "key-of-the-option",
    "secret-of-the-cluster",
)
CALLERS = {
    "no key": (),
    "wrong key": bearer("key-of-nobody-at-all"),
    "another scheme": (("authorization", f"Basic {OPERATE}"),),
    "key alone": (("authorization", OPERATE),),
    "two keys": (*bearer(OPERATE), *bearer(OPERATE)),
    "the cluster secret": bearer(SECRET),
    "use": bearer(USE),
    "lower case": (("authorization", f"bearer {USE}"),),
    "operate": bearer(OPERATE),
    "option": bearer(OPTION),
    "made from the secret": bearer(operator_key(SECRET.encode())),
}
STRANGERS = frozenset(list(CALLERS)[:6])
USERS = frozenset({"use", "lower case"})
KINDS = ("keys", "open", "reachable")
GRPC_STATUS = {401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED}
Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
Fronts = dict[str, tuple[Stage, httpx.AsyncClient, grpc.aio.Channel]]


@contextlib.asynccontextmanager
async def front(
    folder: Path, host: str, **given: Any
) -> AsyncIterator[tuple[Stage, httpx.AsyncClient, grpc.aio.Channel]]:
    """A router between ready nodes, with a client of either front that has no key."""
    async with start_stage(folder, host=host, http_port="0", **given) as stage:
        if "cluster_secret" in given:
            stage.trust(given["cluster_secret"].encode())
        await stage.until("ready", 2)
        assert stage.router.http is not None
        address = f"http://{host}:{stage.router.http.port}"
        async with (
            httpx.AsyncClient(base_url=address, timeout=DEADLINE_S) as http,
            grpc.aio.insecure_channel(f"{host}:{stage.router.server.port}") as channel,
        ):
            yield stage, http, channel


@pytest_asyncio.fixture(scope="module")
async def fronts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fronts]:
    """Routers with keys, without any on loopback, and without any where others could reach it: 127.0.0.2 counts as such."""
    folder = tmp_path_factory.mktemp("access")
    keys = folder / "keys"
    keys.write_text(f"ann use {USE}\nops operate {OPERATE}\n")
    async with (
        front(folder / "a", "127.0.0.1", api_keys_file=str(keys), api_key=OPTION, cluster_secret=SECRET) as first,
        front(folder / "b", "127.0.0.1") as second,
        front(folder / "c", "127.0.0.2", cluster_secret=SECRET) as third,
    ):
        yield dict(zip(KINDS, (first, second, third), strict=True))


def expected(kind: str, caller: str, need: Access) -> int:
    """Return 200 where the call is let in, else HTTP's status of the refusal."""
    if kind == "keys" and need is not Access.OPEN:
        if caller in STRANGERS:
            return 401
        return 403 if caller in USERS and need is Access.OPERATE else 200
    if kind == "reachable" and need is Access.OPERATE:
        return 200 if caller == "made from the secret" else 401
    return 200


async def status_over_grpc(channel: grpc.aio.Channel, method: str, caller: str) -> grpc.StatusCode:
    """Return how a call with an empty request ends; OK for one that is let in."""
    call: Call = channel.stream_stream(method)(metadata=CALLERS[caller], timeout=DEADLINE_S)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(b"")
        await call.done_writing()
    with contextlib.suppress(grpc.aio.AioRpcError):
        if await call.read() is not grpc.aio.EOF:
            call.cancel()
            return grpc.StatusCode.OK
    code = await call.code()
    return code if code in GRPC_STATUS.values() else grpc.StatusCode.OK


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", CALLERS)
async def test_grpc_lets_in_whom_the_table_says(fronts: Fronts, kind: str, caller: str) -> None:
    _, _, channel = fronts[kind]
    found = {method: await status_over_grpc(channel, method, caller) for method in GRPC_ACCESS}
    wanted = {
        method: GRPC_STATUS.get(expected(kind, caller, need), grpc.StatusCode.OK)
        for method, need in GRPC_ACCESS.items()
    }
    assert found == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caller", CALLERS)
async def test_http_lets_in_whom_the_table_says(fronts: Fronts, kind: str, caller: str) -> None:
    _, http, _ = fronts[kind]
    found = {}
    for route in HTTP_ACCESS:
        path = route.replace("{name:path}", "m")
        status = (await http.get(path, headers=CALLERS[caller])).status_code
        if status == 405:
            status = (await http.post(path, json={}, headers=CALLERS[caller])).status_code
        found[route] = status if status in GRPC_STATUS else 200
    assert found == {route: expected(kind, caller, need) for route, need in HTTP_ACCESS.items()}


async def test_every_method_and_path_is_in_the_table(fronts: Fronts) -> None:
    stage, _, _ = fronts["keys"]
    pool = descriptor_pool.Default()
    services = [pool.FindServiceByName(name) for name in stage.router.server._names]
    assert {f"/{service.full_name}/{method.name}" for service in services for method in service.methods} == set(
        GRPC_ACCESS
    )
    assert stage.router.http is not None
    app = stage.router.http._server.config.app
    assert isinstance(app, Starlette)
    assert {route.path for route in app.routes if isinstance(route, Route)} == set(HTTP_ACCESS)


async def test_a_method_that_is_in_no_table_is_for_operators(fronts: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    _, http, channel = fronts["keys"]
    monkeypatch.delitem(GRPC_ACCESS, "/pdserve.v1.InferenceService/ListModels")
    monkeypatch.delitem(HTTP_ACCESS, "/v1/models")
    method = "/pdserve.v1.InferenceService/ListModels"
    assert await status_over_grpc(channel, method, "use") is grpc.StatusCode.PERMISSION_DENIED
    assert await status_over_grpc(channel, method, "operate") is grpc.StatusCode.OK
    assert (await http.get("/v1/models", headers=CALLERS["use"])).status_code == 403


@pytest.mark.parametrize(
    "path", ["/metrics%0A", "/%6Detrics", "/metrics/", "//metrics", "/METRICS", "/v1/../metrics", "/metrics?x"]
)
async def test_no_spelling_of_a_path_goes_round_the_table(fronts: Fronts, path: str) -> None:
    """Starlette takes `/metrics%0A` for `/metrics`; a check that compares paths takes it for another."""
    _, http, _ = fronts["keys"]
    for caller in ("no key", "use"):
        response = await http.get(path, headers=CALLERS[caller], follow_redirects=True)
        assert response.status_code in (401, 403, 404)
        assert "pdserve_router" not in response.text


async def test_refusals_say_what_to_do(fronts: Fronts) -> None:
    for kind, caller, words in (
        ("keys", "no key", "--api-key"),
        ("keys", "use", "scope is operate"),
        ("reachable", "no key", "--admin-port"),
    ):
        _, http, channel = fronts[kind]
        told = (await http.get("/metrics", headers=CALLERS[caller])).json()["error"]["message"]
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetClusterState(inference_pb2.GetClusterStateRequest(), metadata=CALLERS[caller])
        assert error.value.details() == told
        assert words in told


async def test_a_refused_call_submits_nothing_and_is_counted(fronts: Fronts) -> None:
    """gRPC walked past `--api-key`. A refused request is not even read: the call ends while the client still sends."""
    stage, http, channel = fronts["keys"]
    before = stage.router.access.gauges()["denied_calls_total"]
    call: Call = channel.stream_stream("/pdserve.v1.InferenceService/Generate")(timeout=DEADLINE_S)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await http.post(COMPLETIONS, json=body_of(COMPLETIONS))).status_code == 401
    assert stage.router.access.gauges()["denied_calls_total"] == before + 2
    assert stage.router.admission.num_open == len(stage.router.sessions) == 0
    for node in (*stage.prefill, *stage.decode):
        heard = [node.heard.get_nowait().WhichOneof("message") for _ in range(node.heard.qsize())]
        assert "submit" not in heard
