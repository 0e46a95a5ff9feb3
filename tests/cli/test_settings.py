"""Where settings come from, and that every fault is told."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from pdserve.cli.cluster_plan import ClusterOptions, parse_sets, plan_cluster
from pdserve.cli.settings_options import command_of
from pdserve.core.errors import ConfigError
from pdserve.core.handed_secret import HandedSecret
from pdserve.core.node_settings import DecodeSettings, PrefillSettings
from pdserve.core.process_settings import ProcessSettings
from pdserve.core.router_settings import RouterSettings
from pdserve.core.settings import environment_warnings, load_settings

KINDS: list[type[ProcessSettings]] = [RouterSettings, PrefillSettings, DecodeSettings]
EVERY_FIELD = [(kind, name) for kind in KINDS for name in kind.model_fields]
SOURCES = ("option", "environment", "table", "top of file", "default")
SAMPLES: Mapping[str, tuple[str, str, str, str]] = {
    "model": ("a", "b", "c", "d"),
    "drain_s": ("1", "2", "3", "4"),
    "prefill": ("h:1", "h:2", "h:3", "h:4"),
    "max_queue": ("1", "2", "3", "4"),
    "block_size": ("1", "2", "3", "4"),
    "reserve": ("on_submit", "on_open", "on_submit", "on_submit"),
    "token_budget": ("1", "2", "3", "4"),
    "cluster_secret": ("a", "b", "c", "d"),
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        for name in [*kind.model_fields, "config", "test"]:
            monkeypatch.delenv(f"PDSERVE_{name.upper()}", raising=False)


def run_command(kind: type[ProcessSettings], arguments: list[str]) -> ProcessSettings:
    """Return the settings that the command line of a process arrives at."""
    loaded: list[ProcessSettings] = []

    def run(given: Mapping[str, Any], config: Path | None) -> None:
        loaded.append(load_settings(kind, given, config))

    app = typer.Typer()
    app.command()(command_of(kind, run, "A process."))
    app(arguments, standalone_mode=False)
    return loaded[0]


@pytest.mark.parametrize(("kind", "name"), EVERY_FIELD, ids=lambda value: getattr(value, "table", value))
def test_every_setting_is_an_option(kind: type[ProcessSettings], name: str) -> None:
    seen: list[Mapping[str, Any]] = []
    app = typer.Typer()
    app.command()(command_of(kind, lambda given, _: seen.append(given), "A process."))
    app([f"--{name.replace('_', '-')}", "text"], standalone_mode=False)
    assert seen == [{name: "text"}]


@pytest.mark.parametrize("first", range(len(SOURCES)), ids=lambda i: SOURCES[i])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, name in EVERY_FIELD if name in SAMPLES],
    ids=lambda value: getattr(value, "table", value),
)
def test_first_source_wins(
    kind: type[ProcessSettings], name: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sources from `first` on say something; the first of them is heard."""
    samples = SAMPLES[name]
    config = tmp_path / "pdserve.toml"
    is_number = samples[0].isdigit()
    top, table = (value if is_number else f'"{value}"' for value in (samples[3], samples[2]))
    lines = [f"{name} = {top}"] if first <= 3 else []
    lines += [f"[{kind.table}]", f"{name} = {table}"] if first <= 2 else []
    config.write_text("\n".join(lines), encoding="utf-8")
    if first <= 1:
        monkeypatch.setenv(f"PDSERVE_{name.upper()}", samples[1])
    arguments = ["--config", str(config)]
    if first == 0:
        arguments += [f"--{name.replace('_', '-')}", samples[0]]
    settings = run_command(kind, arguments)
    expected = kind.model_fields[name].default if first == 4 else samples[first]
    heard = getattr(settings, name)
    if name == "cluster_secret":
        heard = None if heard is None else heard.get_secret_value()
    if name == "prefill":
        heard = ",".join(heard) if heard else ()
    assert heard == expected or str(heard) == expected or float(heard) == float(expected)


def test_file_is_found_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pdserve.toml"
    config.write_text("lease_s = 9\n[decode]\nmax_batch = 5", encoding="utf-8")
    monkeypatch.setenv("PDSERVE_CONFIG", str(config))
    settings = run_command(DecodeSettings, [])
    assert isinstance(settings, DecodeSettings)
    assert (settings.lease_s, settings.max_batch) == (9.0, 5)
    assert run_command(RouterSettings, []).lease_s == 9.0


def test_repeated_addresses_are_joined() -> None:
    settings = run_command(RouterSettings, ["--decode", "a:1", "--decode", "b:2,c:3"])
    assert isinstance(settings, RouterSettings)
    assert settings.decode == ("a:1", "b:2", "c:3")


def faults_of(kind: type[ProcessSettings], arguments: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        run_command(kind, arguments)
    return error.value.faults


def test_all_faults_are_told_at_once_whatever_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a single field from each source, and two between fields."""
    config = tmp_path / "pdserve.toml"
    config.write_text('[decode]\nmax_batch = "many"\nnonsense = 1\n', encoding="utf-8")
    monkeypatch.setenv("PDSERVE_KV_BLOCKS", "0")
    arguments = ["--config", str(config), "--port", "99999", "--host", "0.0.0.0", "--hold-at", "decoding"]
    faults = faults_of(DecodeSettings, [*arguments, "--beat-s", "2"])
    named = [fault.partition(":")[0] for fault in faults]
    table = f"{config} [decode]"
    assert sorted(named) == sorted(
        [
            *(f"{table} max_batch", f"{table} nonsense", "PDSERVE_KV_BLOCKS", "--port", "--hold-at"),
            *("advertise", "cluster_secret", "lease_s"),
        ]
    )


def test_whole_file_is_checked_whoever_reads_it(tmp_path: Path) -> None:
    """Strays, and wrong values, of every table; also those that an option overrides."""
    config = tmp_path / "pdserve.toml"
    config.write_text(
        'drain_s = "soon"\ncolour = 1\nmax_batch = 0\n[lab]\nx = 1\n[router]\nmax_queue = 0\n'
        '[prefill]\nblock_sise = 3\nmax_batch = 4\n[decode]\nreserve = "on_close"\n',
        encoding="utf-8",
    )
    given = {"drain_s": "3"}
    faults = []
    for kind in KINDS:
        with pytest.raises(ConfigError) as error:
            load_settings(kind, given, config)
        faults.append(sorted(error.value.faults))
    assert faults[0] == faults[1] == faults[2]
    told = [fault.removeprefix(f"{config} ") for fault in faults[0]]
    assert told == [
        "[decode] reserve: must be on_submit or on_open (given: 'on_close')",
        "[lab]: unknown table",
        "[prefill] block_sise: unknown setting; did you mean block_size?",
        "[prefill] max_batch: unknown setting; it is one of [decode]",
        "[router] max_queue: must be a whole number above 0 (given: 0)",
        "colour: unknown setting",
        "drain_s: must be a number above 0, at most 86,400 (given: 'soon')",
        "max_batch: must be a whole number above 0 (given: 0)",
    ]


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--log-format", "yaml", "must be text or json"),
        ("--log-level", "loud", "must be debug, info, warning or error"),
        ("--port", "x", "must be a whole number from 0 to 65,535"),
        ("--growth-blocks", "-1", "must be a whole number at least 0"),
        ("--max-model-len", "0", "must be a whole number above 0"),
        ("--lease-s", "nan", "must be a number above 0, at most 86,400"),
    ],
)
def test_fault_names_the_option_the_rule_and_the_value(option: str, value: str, rule: str) -> None:
    assert faults_of(DecodeSettings, [option, value]) == [f"{option}: {rule} (given: {value!r})"]


def test_variables_that_mean_nothing_are_told_with_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KV_BLOKS", "CACHE", "COMMIT", "ROUTER_SERVICE_HOST", "ROUTER_PORT_50051_TCP_ADDR", "LEASE_S"):
        monkeypatch.setenv(f"PDSERVE_{name}", "1")
    assert environment_warnings() == {
        "PDSERVE_KV_BLOKS": "environment variable PDSERVE_KV_BLOKS is not known, and ignored; did you mean PDSERVE_KV_BLOCKS?"
    }


@pytest.mark.parametrize("option", ["--advertise", "--kv-advertise"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_address_that_nobody_can_reach_is_refused(option: str, host: str) -> None:
    (fault,) = faults_of(DecodeSettings, [option, host])
    assert fault.startswith(f"{option}: ")


def test_off_loopback_a_secret_is_required_and_never_shown(tmp_path: Path) -> None:
    (fault,) = faults_of(PrefillSettings, ["--host", "10.0.0.5"])
    assert "PDSERVE_CLUSTER_SECRET" in fault
    config = tmp_path / "pdserve.toml"
    config.write_text("cluster_secret = 123456\n", encoding="utf-8")
    (fault,) = faults_of(PrefillSettings, ["--config", str(config)])
    assert fault == f"{config} cluster_secret: must be text"
    settings = run_command(PrefillSettings, ["--host", "10.0.0.5", "--cluster-secret", "quiet and long enough"])
    assert "quiet" not in repr(settings)


def test_short_secret_is_for_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = run_command(PrefillSettings, ["--cluster-secret", "short"]).secret
    assert secret is not None
    assert secret.accepted == (b"short",)
    (fault,) = faults_of(PrefillSettings, ["--host", "10.0.0.5", "--cluster-secret", "x" * 15])
    assert fault == "--cluster-secret: must have at least 16 characters off loopback"
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", "")
    (fault,) = faults_of(PrefillSettings, [])
    assert fault.startswith("PDSERVE_CLUSTER_SECRET: must not be empty")


def test_decode_address_given_as_prefill_is_refused_by_name() -> None:
    (fault,) = faults_of(RouterSettings, ["--prefill", "a:1,b:2", "--decode", "b:2"])
    assert "b:2 is also given as prefill" in fault


def test_hold_is_for_tests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = faults_of(DecodeSettings, ["--hold-at", "decoding:3"])
    assert "PDSERVE_TEST=1" in fault
    monkeypatch.setenv("PDSERVE_TEST", "1")
    assert run_command(DecodeSettings, ["--hold-at", "decoding:3"]).hold_at == "decoding:3"
    (fault,) = faults_of(DecodeSettings, ["--hold-at", "sleeping"])
    assert "sleeping" in fault


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"port = ", "this is not TOML: invalid value (at end of document)"),
        (b"\xff", "this is not UTF-8 text (byte 0)"),
        (None, "there is no such file"),
    ],
)
def test_file_that_cannot_be_read_is_one_fault_among_others(content: bytes | None, named: str, tmp_path: Path) -> None:
    config = tmp_path / "pdserve.toml"
    if content is not None:
        config.write_bytes(content)
    faults = faults_of(RouterSettings, ["--config", str(config), "--port", "x"])
    assert f"{config}: {named}" in faults
    assert len(faults) == 2


def test_cluster_passes_each_setting_to_the_roles_that_have_it() -> None:
    sets = ("token-budget=64", "decode.block_size=32")
    planned = plan_cluster(ClusterOptions("2", "1", {"block_size": "16", "port": "7000"}, sets))
    plan = planned.plan
    assert planned.models == ("smollm2-135m-instruct",)
    assert plan.port == 7000
    assert [node.name for node in plan.nodes] == ["prefill-0", "prefill-1", "decode-0"]
    prefill, decode = plan.nodes[0].command, plan.nodes[2].command
    assert {"--block-size=16", "--token-budget=64"} <= set(prefill)
    assert "--block-size=32" in decode
    assert not {"--block-size=16", "--token-budget=64"} & set(decode)
    assert not any(argument.startswith(("--block-size", "--port")) for argument in plan.router.command)


def test_cluster_tells_all_faults_at_once_with_where_they_came_from(tmp_path: Path) -> None:
    config = tmp_path / "pdserve.toml"
    config.write_text("[router]\nmax_queue = 0\n[lab]\n", encoding="utf-8")
    options = ClusterOptions(
        "0", "many", {"port": "x", "kv_blocks": "0"}, ("decode.max_batch=0", "colour=1", "lease_s=0"), config
    )
    with pytest.raises(ConfigError) as error:
        plan_cluster(options)
    assert sorted(fault.partition(":")[0] for fault in error.value.faults) == sorted(
        [
            *("--prefill", "--decode", "--port", "--kv-blocks"),
            *("--set decode.max_batch", "--set colour", "--set lease_s"),
            *(f"{config} [router] max_queue", f"{config} [lab]"),
        ]
    )


@pytest.mark.parametrize(
    "text", ["port", "x.port=1", "colour=1", "decode.token_budget=1", "ready_fd=3", "prefill.port=1"]
)
def test_set_that_means_nothing_is_refused(text: str) -> None:
    (fault,) = parse_sets([text]).faults
    assert text.partition("=")[0] in fault


def test_a_local_cluster_hands_its_secret_on_unless_one_is_configured(tmp_path: Path) -> None:
    """Encryption of KV too works with it."""
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("configured", encoding="utf-8")
    with HandedSecret() as secret:
        planned = plan_cluster(ClusterOptions(sets=("kv_encryption=curve",)), secret)
        assert planned.plan.secret is secret
        words = [word for process in (planned.plan.router, *planned.plan.nodes) for word in process.command]
        assert not any(secret.value.decode() in word for word in words)
        for own in (f"cluster_secret_file={file}", "cluster_secret=configured"):
            assert plan_cluster(ClusterOptions(sets=(own,)), secret).plan.secret is None
    with pytest.raises(ConfigError, match="needs cluster_secret"):
        plan_cluster(ClusterOptions(sets=("kv_encryption=curve",)))
    (fault,) = parse_sets(["cluster_secret_fd=3"]).faults
    assert "decides cluster_secret_fd itself" in fault
