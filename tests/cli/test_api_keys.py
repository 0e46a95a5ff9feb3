"""Which key a command sends, and that no command shows one."""

import sys
from pathlib import Path

import pytest

from pdserve.cli.api_keys import key_to_send, operators_key, own_key
from pdserve.cli.cluster_plan import ClusterOptions, parse_sets, plan_cluster
from pdserve.cli.router_probe import RouterProbe
from pdserve.core.api_keys import operator_key
from pdserve.core.errors import ConfigError, Unauthenticated
from pdserve.core.router_settings import RouterSettings
from pdserve.core.run_secret import RunFile
from pdserve.core.settings import load_settings
from tests.cli.test_command_line import pdserve_beside
from tests.client.stub_router import StubRouter, stub_router

KEY, OTHER, SECRET = "sesame-sesame-sesame", "sesame-sesame-second", "sesame-of-the-cluster"

ROUTER = "127.0.0.1:50051"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "API_KEYS_FILE", "CLUSTER_SECRET", "CLUSTER_SECRET_FILE"):
        monkeypatch.delenv(f"PDSERVE_{name}", raising=False)


def test_a_command_sends_the_first_of_the_routers_list() -> None:
    assert key_to_send(f" {KEY} ,{OTHER}") == KEY
    assert key_to_send("") is key_to_send(" , ") is None


def test_status_makes_a_key_of_the_secret_if_none_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert operators_key("", ROUTER) is None
    file = tmp_path / "secret"
    file.write_text("new secret of a file\nold secret of a file\n")
    file.chmod(0o600)
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET_FILE", str(file))
    assert operators_key("", ROUTER) == operator_key(b"new secret of a file")
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", SECRET)
    assert operators_key("", ROUTER) == operator_key(SECRET.encode())
    assert operators_key(KEY, ROUTER) == KEY
    raw = b"\xff\xfe-bytes-that-are-no-text"
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", raw.decode(errors="surrogateescape"))
    assert operators_key("", ROUTER) == operator_key(raw)


def test_status_makes_a_key_of_the_secret_of_a_local_cluster_and_sends_it_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RunFile(SECRET.encode()) as run:
        run.tell([ROUTER, "127.0.0.1:40001"])
        assert operators_key("", ROUTER) == operator_key(SECRET.encode())
        for other in ("localhost:50051", "[::1]:50051"):
            assert operators_key("", other) is None, "another user may listen there"
        assert operators_key("", "127.0.0.1:50052") is None
        assert operators_key("", "10.0.0.1:50051") is None
    assert operators_key("", ROUTER) is None


def test_a_supervisor_finds_a_key_for_its_own_router(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# {OTHER} is old\nann use {OTHER}\nops operate {KEY}\nbob use {OTHER}3\n")

    def own(**given: str) -> str | None:
        return own_key(load_settings(RouterSettings, given))

    assert own() is None
    assert own(api_keys_file=str(path)) == KEY
    assert own(api_keys_file=str(path), cluster_secret=SECRET) == operator_key(SECRET.encode())
    assert own(api_key=f"first,{OTHER}x", api_keys_file=str(path), cluster_secret=SECRET) == "first"
    path.write_text(f"ann use {OTHER}\n")
    assert own(api_keys_file=str(path)) == OTHER, "enough for a question"
    planned = plan_cluster(ClusterOptions(sets=(f"router.api_key={KEY}",)))
    assert planned.api_key == KEY
    assert KEY not in repr(planned).replace(f"--api-key={KEY}", ""), "the child's command has it, as the user's own has"


@pytest.mark.asyncio
async def test_the_probe_sends_it() -> None:
    router = StubRouter()
    async with stub_router(router) as (_, address):
        probe = RouterProbe(api_key=KEY)
        try:
            await probe(address)
            assert probe._client is not None
            await probe._client.cluster_state()
        finally:
            await probe.close()
        assert router.authorizations == [f"Bearer {KEY}"]


@pytest.mark.asyncio
@pytest.mark.parametrize("command", ["status", "generate", "chat"])
@pytest.mark.parametrize("source", ["option", "environment"])
async def test_commands_send_the_key_and_never_show_it(
    command: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = StubRouter()
    arguments = [command, *(["hello"] if command == "generate" else [])]
    if source == "option":
        arguments += ["--api-key", KEY]
    else:
        monkeypatch.setenv("PDSERVE_API_KEY", f"{KEY},{OTHER}")
    async with stub_router(router) as (_, address):
        arguments += ["--server", address]
        if command != "chat":
            router.refusals.append(Unauthenticated("the API key is missing or wrong", hint="send another"))
            code, out, err = await pdserve_beside("--debug", *arguments)
            assert (code, "Traceback" in err, "error: the API key is missing or wrong" in err) == (1, True, True)
            assert "sesame" not in out + err
        code, out, err = await pdserve_beside(*arguments)
        assert (code, "sesame" in out + err) == (0, False)
        assert set(router.authorizations) == {f"Bearer {KEY}"}


@pytest.mark.asyncio
async def test_status_proves_that_it_knows_the_secret_and_never_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", SECRET)
    router = StubRouter()
    async with stub_router(router) as (_, address):
        assert (await pdserve_beside("status", "--server", address))[0] == 0
        assert set(router.authorizations) == {f"Bearer {operator_key(SECRET.encode())}"}
        router.authorizations.clear()
        assert (await pdserve_beside("generate", "hello", "--server", address))[0] == 0
        assert set(router.authorizations) == {None}, "a request is no operator's business"


@pytest.mark.parametrize("target", ["routr.api_key", "api-key-file", "router.api_key_", "clustr.cluster_secret"])
def test_what_set_cannot_use_is_told_without_its_value(target: str) -> None:
    (fault,) = parse_sets([f"{target}={KEY}"]).faults
    assert target in fault
    assert "sesame" not in fault


@pytest.mark.parametrize("option", ["--set", "--api-key"])
def test_faults_of_files_and_options_never_show_a_key(option: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"ann use {KEY}\nops operate {KEY}\nbob {KEY}\n")
    with pytest.raises(ConfigError) as error:
        if option == "--set":
            plan_cluster(ClusterOptions(sets=(f"router.api_keys_file={path}",)))
        else:
            load_settings(RouterSettings, {"api_keys_file": str(path), "api_key": f"{OTHER}é"})
    told = str(error.value)
    assert "sesame" not in told
    assert sys.getsizeof(told) < 4096
    if option == "--set":
        assert "--set router.api_keys_file: line 2: the key of line 1 again" in told
        assert "--set router.api_keys_file: line 3: has 2 words" in told
    else:
        assert "--api-key: must be printable ASCII" in told
