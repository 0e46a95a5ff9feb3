"""Keys and admin ports through real processes: who is let in, while the file of keys changes under a running router."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pdserve.client import NO_RETRIES, AsyncClient, Options
from pdserve.core.errors import Forbidden, PdserveError, Unauthenticated
from tests.e2e.cluster import DEADLINE_S, ROOT, Cluster, start_cluster, until
from tests.e2e.test_up import up
from tests.e2e.tiny_model import expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]
OLD, NEW, OPERATE = "sesame-of-ann-number-1", "sesame-of-ann-number-2", "sesame-of-the-operator"
SECRET = "sesame-of-the-cluster"
OPS = f"# who looks after it\nprometheus operate {OPERATE}\n"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{OPS}ann use {OLD}\n")
    return path


@pytest_asyncio.fixture(scope="module")
async def cluster(tiny: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    admin = ("--admin-port", "0")
    async with start_cluster(
        tiny,
        tmp_path_factory.mktemp("guarded"),
        prefill=(admin,),
        decode=(admin,),
        router=(*admin, "--api-keys-file", str(keys)),
        secret=SECRET,
        api_key=OPERATE,
    ) as running:
        yield running


def set_keys(path: Path, *lines: str) -> None:
    """Replace the file as an operator should: a new one is moved over it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(OPS + "\n".join(lines) + "\n")
    fresh.replace(path)


async def outcome(cluster: Cluster, key: str | None) -> str:
    """Return what becomes of a request with this key: "tokens", or the error's name."""
    async with AsyncClient(cluster.router.grpc, api_key=key, retry=NO_RETRIES) as client:
        try:
            answer = await client.complete("who may ask", Options(max_tokens=NUM_TOKENS))
        except PdserveError as error:
            return error.reason
        assert len(answer.token_ids) == NUM_TOKENS
        return "tokens"


async def test_without_a_good_key_nothing_reaches_a_node(cluster: Cluster, tiny: Path) -> None:
    """gRPC walked past `--api-key`."""
    before = [await cluster.gauge(node, "steps") for node in cluster.nodes]
    for key in (None, "sesame-of-a-stranger", SECRET, OLD[:-1]):
        assert await outcome(cluster, key) == "UNAUTHENTICATED"
    assert [await cluster.gauge(node, "steps") for node in cluster.nodes] == before
    state = await cluster.client.cluster_state()
    assert (state.gauges["denied_calls_total"], state.gauges["admitted"]) == (4, 0)
    async with AsyncClient(cluster.router.grpc, api_key=OLD) as ann:
        answer = await ann.complete("who may ask", Options(max_tokens=NUM_TOKENS))
        assert answer.token_ids == expected_tokens(tiny, prompt_ids("who may ask"), NUM_TOKENS)[0]
        with pytest.raises(Forbidden):
            await ann.cluster_state()
    async with AsyncClient(cluster.router.grpc) as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.cluster_state()
        assert await stranger.is_ready(), "probes need no key"
    await cluster.leak_oracle()


async def test_a_key_is_changed_without_a_gap_under_a_running_router(cluster: Cluster, keys: Path) -> None:
    async def is_let_in(key: str) -> bool:
        return await outcome(cluster, key) == "tokens"

    async def is_kept_out(key: str) -> bool:
        return await outcome(cluster, key) == "UNAUTHENTICATED"

    set_keys(keys, f"ann use {OLD}", f"ann use {NEW}")
    await until(lambda: is_let_in(NEW), "the new key is good")
    assert await is_let_in(OLD), "both are"
    set_keys(keys, f"ann use {NEW}")
    await until(lambda: is_kept_out(OLD), "the old key is good no more")
    assert await is_let_in(NEW)
    set_keys(keys, f"ann rule {OLD}")

    async def is_told() -> bool:
        return "line 3: the scope must be use or operate" in cluster.router.log.read_text()

    await until(is_told, "the log tells what is wrong")
    assert await is_let_in(NEW), "wrong content changes nothing"
    set_keys(keys, f"ann use {OLD}")
    await until(lambda: is_let_in(OLD), "the file counts again")
    log = cluster.router.log.read_text()
    assert "owner=ann" in log
    for process in (cluster.router, *cluster.nodes.values()):
        assert "sesame" not in process.log.read_text()
    await cluster.leak_oracle()


async def test_prometheus_scrapes_with_its_key_or_at_the_admin_ports(cluster: Cluster) -> None:
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        for key, status in ((None, 401), (OLD, 403), (OPERATE, 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for path in ("/metrics", "/load", "/debug/state"):
                response = await http.get(f"http://{cluster.router.http}{path}", headers=headers)
                assert response.status_code == status
        assert (await http.get(f"http://{cluster.router.http}/health")).status_code == 200
        load = (await http.get(f"http://{cluster.router.admin}/load")).json()
        assert [load["pools"][role]["usable"] for role in ("prefill", "decode")] == [1, 1]
        assert load["pools"]["decode"]["free_blocks"] == load["pools"]["decode"]["blocks"] > 0
        for process in (cluster.router, *cluster.nodes.values()):
            assert (await http.get(f"http://{process.admin}/health")).json() == {"status": "ready"}
            prefix = "pdserve_router_" if process is cluster.router else "pdserve_node_"
            metrics = (await http.get(f"http://{process.admin}/metrics")).text
            assert f"{prefix}process_resident_bytes " in metrics
            assert "sesame" not in metrics + (await http.get(f"http://{process.admin}/debug/state")).text
        decode = (await http.get(f"http://{cluster.nodes['decode0'].admin}/debug/state")).json()
        assert decode["gauges"].keys() == (await cluster.node_state("decode0")).gauges.keys()
        assert decode["violations"] == []


async def test_who_knows_the_cluster_secret_gets_a_status(cluster: Cluster) -> None:
    for secret, code, words in (
        (SECRET, 0, "prefill"),
        ("sesame-of-another-cluster", 1, "API key"),
        ("", 1, "--api-key"),
    ):
        environment = {name: value for name, value in os.environ.items() if name != "PDSERVE_CLUSTER_SECRET"}
        if secret:
            environment["PDSERVE_CLUSTER_SECRET"] = secret
        command = ["-m", "pdserve.cli", "status", "--server", cluster.router.grpc]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdout=PIPE, stderr=PIPE, env=environment
        )
        async with asyncio.timeout(DEADLINE_S):
            out, err = await process.communicate()
        told = (out + err).decode()
        assert (process.returncode, words in told, "sesame" in told) == (code, True, False), told


async def test_a_supervised_cluster_with_keys_gets_ready_and_tells_its_admin_ports(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    set_keys(path, f"ann use {OLD}")
    options = ("--http-port", "0", "--set", f"router.api_keys_file={path}", "--set", "admin_port=0")
    async with up(tiny, *options) as running, httpx.AsyncClient(timeout=DEADLINE_S) as http:
        started = await running.until_event("started", 3)
        admins = {event["role"]: event["addresses"]["admin"] for event in started}
        assert admins.keys() == {"router", "prefill", "decode"}
        for address in admins.values():
            assert (await http.get(f"http://{address}/health")).status_code == 200
        async with AsyncClient(running.address, api_key=OLD) as ann:
            assert len((await ann.complete("x", Options(max_tokens=2))).token_ids) == 2
        async with AsyncClient(running.address) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.models()
