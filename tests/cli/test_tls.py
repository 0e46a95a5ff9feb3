"""TLS on the command line: the options of commands that call a router, and the plan of a cluster that speaks it."""

import asyncio
from pathlib import Path

import pytest

from pdserve.cli.cluster_plan import ClusterOptions, plan_cluster
from pdserve.cli.cluster_tls import own_tls
from pdserve.cli.events import Ready
from pdserve.cli.exit_codes import ExitCode
from pdserve.cli.router_probe import RouterProbe
from pdserve.core.certificates import TlsFiles
from pdserve.core.errors import ConfigError
from pdserve.core.settings import environment_warnings
from tests.certificates import Authority, Pair, files_of
from tests.cli.test_command_line import pdserve_beside
from tests.client.stub_router import stub_router

COMMANDS = (("generate", "hi"), ("status",), ("chat",))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TLS", "TLS_CERT", "TLS_KEY", "TLS_CA", "TLS_CLIENT_CA"):
        monkeypatch.delenv(f"PDSERVE_{name}", raising=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
async def test_options_and_variables_reach_a_router_that_wants_a_certificate(
    authority: Authority, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = authority.issue("client")
    async with stub_router(tls=files_of(authority.issue("router"), authority.ca)) as (_, address):
        words = (*command, "--server", address)
        files = ("--tls-ca", str(authority.ca), "--tls-cert", str(client.cert), "--tls-key", str(client.key))
        status, _, err = await pdserve_beside(*words, *files)
        assert status == ExitCode.OK, err
        status, _, err = await pdserve_beside(*words, *files[:2])
        assert status == ExitCode.UNAVAILABLE
        assert "wants a client certificate" in err
        status, _, err = await pdserve_beside(*words, *files[:4])
        assert status == ExitCode.USAGE
        assert "--tls-cert and --tls-key go together" in err
        for name, value in zip(files[::2], files[1::2], strict=True):
            monkeypatch.setenv("PDSERVE_" + name[2:].replace("-", "_").upper(), value)
        status, _, err = await pdserve_beside(*words)
        assert status == ExitCode.OK, err


@pytest.mark.asyncio
async def test_tls_alone_trusts_the_system(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_TLS", "1")
    assert "PDSERVE_TLS" not in environment_warnings()
    async with stub_router(tls=files_of(authority.issue("router"))) as (_, address):
        status, _, err = await pdserve_beside("status", "--server", address)
        assert status == ExitCode.UNAVAILABLE
        assert "is signed by no authority that is trusted here" in err
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        status, _, err = await pdserve_beside("status", "--server", address)
        assert status == ExitCode.OK, err


def plan(pair: Pair, **more: Path) -> ClusterOptions:
    files = {"tls_cert": pair.cert, "tls_key": pair.key, **more}
    return ClusterOptions(shared={"port": "0"}, sets=tuple(f"{name}={path}" for name, path in files.items()))


def test_every_process_of_a_cluster_is_given_the_files(authority: Authority) -> None:
    pair = authority.issue("all")
    planned = plan_cluster(plan(pair, tls_ca=authority.ca)).plan
    for process in (planned.router, *planned.nodes):
        assert {f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-ca={authority.ca}"} <= set(process.command)
    assert planned.tls == TlsFiles(pair.cert, pair.key, authority.ca)
    assert plan_cluster(ClusterOptions(shared={"port": "0"})).plan.tls is None


def test_what_would_keep_the_processes_apart_is_told_before_they_start(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    cases = (
        (plan(authority.issue("a"), tls_ca=other.ca), "tls_ca: .* does not vouch for .* the router calls its nodes"),
        (
            plan(authority.issue("b"), tls_client_ca=other.ca),
            "tls_client_ca: .* with which `pdserve up` calls its router",
        ),
        (plan(authority.issue("c", "models.example.org"), tls_ca=authority.ca), "must name 127.0.0.1"),
        (plan(Pair(authority.issue("d").cert, authority.issue("e").key)), "--set tls_key: .* is not the key"),
    )
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            plan_cluster(options)
    plan_cluster(plan(authority.issue("f", "models.example.org")))


@pytest.mark.asyncio
async def test_the_supervisor_reaches_its_router_whatever_its_certificate_names(
    authority: Authority, tmp_path: Path
) -> None:
    """With an authority, and with a certificate that is its own; neither names 127.0.0.1."""
    named = authority.issue("named", "*.example.org")
    alone = await self_signed(tmp_path)
    for router, ca, asks in ((named, authority.ca, True), (alone, None, False)):
        async with stub_router(tls=files_of(router, authority.ca if asks else None)) as (_, address):
            probe = RouterProbe(own_tls(TlsFiles(router.cert, router.key, ca), "127.0.0.1"))
            assert await probe(address) == ""
            await probe.close()


async def self_signed(folder: Path) -> Pair:
    """Return a pair as `openssl req -x509` makes it."""
    pair = Pair(folder / "self.crt", folder / "self.key")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 9 -subj /CN=x -addext subjectAltName=DNS:models.example.org"
    )
    process = await asyncio.create_subprocess_exec(
        *command.split(), "-keyout", pair.key, "-out", pair.cert, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    return pair


def test_a_ready_cluster_says_how_to_reach_it() -> None:
    line = Ready("127.0.0.1:1", "127.0.0.1:2", "--tls-ca ca.pem").line()
    assert "generate --server 127.0.0.1:1 --tls-ca ca.pem --chat" in line
    assert "https://127.0.0.1:2/v1" in line
