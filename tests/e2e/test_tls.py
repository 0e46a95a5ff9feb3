"""Whole clusters with TLS on both fronts and mutual TLS on the links: exact answers, a resume, new files, and nothing left."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.client import Options
from tests.certificates import Authority, Pair, trust
from tests.e2e.cluster import DEADLINE_S, ROOT, START_S, Cluster, start_cluster, until
from tests.e2e.test_up import up
from tests.e2e.tiny_model import expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]
NUM_TOKENS = 24


def tls_options(authority: Authority, pair: Pair) -> tuple[str, ...]:
    return ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-ca", str(authority.ca))


async def http_tokens(cluster: Cluster, context: ssl.SSLContext, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=f"https://{cluster.router.http}", verify=context, timeout=DEADLINE_S) as http:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids


async def test_a_cluster_with_tls_everywhere_answers_exactly_and_resumes(tiny: Path, tmp_path: Path) -> None:
    """A decode node dies in mid-stream and comes back when the files were renewed on every side; strangers knock meanwhile."""
    authority = Authority(tmp_path)
    router, prefill, decode = (authority.issue(name) for name in ("router", "prefill", "decode"))
    client = authority.issue("client")
    node_options = tls_options(authority, decode)
    async with start_cluster(
        tiny,
        tmp_path,
        prefill=(tls_options(authority, prefill),),
        decode=((*node_options, "--hold-at", "decoding:8"), node_options),
        router=(*tls_options(authority, router), "--tls-client-ca", str(authority.ca)),
        secret="a secret of the whole cluster",
        tls=trust(authority, client),
    ) as cluster:
        prompt = prompt_ids("a node with TLS is lost")
        tokens, _ = expected_tokens(tiny, prompt, NUM_TOKENS)
        asking = [asyncio.create_task(cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))) for _ in range(2)]
        await cluster.until_held("decode0")
        cluster.nodes["decode0"].kill()
        answers = await asyncio.gather(*asking)
        assert [answer.token_ids for answer in answers] == [tokens] * 2
        assert sorted(answer.summary.timeline.attempts for answer in answers if answer.summary) == [1, 2]

        for pair in (router, decode):
            pair.become(authority.issue("renewed"))
        with knocking(cluster.router.grpc, cluster.router.http, cluster.nodes["decode1"].grpc):
            port = int(cluster.nodes["decode0"].grpc.rpartition(":")[2])
            cluster.start_node(
                "decode", "decode0", *node_options, "--cluster-secret", "a secret of the whole cluster", port=port
            )
            await cluster.until_ready(3)
            again = [cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS)) for _ in range(4)]
            assert [answer.token_ids for answer in await asyncio.gather(*again)] == [tokens] * 4
            context = ssl.create_default_context(cafile=authority.ca)
            context.load_cert_chain(client.cert, client.key)
            assert await http_tokens(cluster, context, prompt) == tokens
        await cluster.leak_oracle()


@contextlib.contextmanager
def knocking(*addresses: str) -> Any:
    """Hold open connections to ports, that say nothing or garbage."""
    ends = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        for word in (b"", b"\x16\x03\x01\x40\x00" + b"x" * 5000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00") * 5:
            ends.append(socket.create_connection((host, int(port)), DEADLINE_S))
            with contextlib.suppress(OSError):
                ends[-1].sendall(word)
    try:
        yield
    finally:
        for end in ends:
            end.close()


async def test_a_node_of_another_authority_is_named_and_not_used(tiny: Path, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    ours, theirs = authority.issue("ours"), other.issue("theirs")
    async with start_cluster(
        tiny,
        tmp_path,
        prefill=(tls_options(authority, ours),),
        decode=(tls_options(authority, ours),),
        router=tls_options(authority, ours),
        tls=trust(authority, ours),
    ) as cluster:
        cluster.nodes["decode0"].kill()
        port = int(cluster.nodes["decode0"].grpc.rpartition(":")[2])
        stranger = tls_options(other, theirs)
        cluster.start_node("decode", "decode0", *stranger, port=port)

        async def is_named() -> bool:
            state = await cluster.state()
            return any("signed by no authority" in node.reason for node in state.nodes if node.state == "down")

        await until(is_named, "the router says why")
        told = await pdserve("status", "--server", cluster.router.grpc, *tls_options(authority, ours))
        assert (
            f"{cluster.nodes['decode0'].grpc} is down: its certificate is signed by no authority in this router's tls_ca"
            in told
        )
        cluster.nodes["decode0"].kill()
        cluster.start_node("decode", "decode0", *tls_options(authority, ours), port=port)
        await cluster.until_ready(2)


async def pdserve(*arguments: str, **variables: str) -> str:
    """Run a command to its end, and return what it said on both streams."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "300"} | variables,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), START_S)
    finally:
        if process.returncode is None:
            process.kill()
    return f"{said.decode()}\nexit {process.returncode}"


@pytest.mark.parametrize(
    "asks", [pytest.param(False, marks=pytest.mark.deep, id="server"), pytest.param(True, id="mutual")]
)
async def test_up_runs_with_tls_and_commands_reach_it(tiny: Path, tmp_path: Path, asks: bool) -> None:
    """The supervisor asks its own router whether it serves, with the router's own files."""
    authority = Authority(tmp_path)
    pair = authority.issue("all", "127.0.0.1", "models.example.org")
    options = tls_options(authority, pair)
    more = ("--set", f"tls_client_ca={authority.ca}") if asks else ()
    async with up(tiny, *options, *more) as running:
        (ready,) = await running.until_event("ready")
        assert ready["tls_options"].startswith(f"--tls-ca {authority.ca}")
        assert ("--tls-cert" in ready["tls_options"]) == asks
        ask = ("generate", "--server", running.address, "--max-tokens", "4", "hello")
        answer = await pdserve(*ask, "--json", *ready["tls_options"].split())
        last = [line for line in answer.splitlines() if line.startswith("{")][-1]
        assert json.loads(last)["finish_reason"] == "LENGTH"
        by_variables = await pdserve(
            *ask,
            PDSERVE_TLS_CA=str(authority.ca),
            PDSERVE_TLS_CERT=str(pair.cert),
            PDSERVE_TLS_KEY=str(pair.key),
        )
        assert by_variables.endswith("exit 0")
        plain = await pdserve(*ask)
        assert "as a port that speaks TLS does" in plain
        assert "--tls-ca FILE" in plain
        assert plain.endswith("exit 4")


async def test_demo_takes_tls_from_the_environment(tiny: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("all")
    files = {"PDSERVE_TLS_CERT": str(pair.cert), "PDSERVE_TLS_KEY": str(pair.key)}
    said = await pdserve("demo", "--model", str(tiny), "--max-tokens", "4", **files, PDSERVE_TLS_CA=str(authority.ca))
    assert said.endswith("exit 0"), said
