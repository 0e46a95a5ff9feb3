"""Settings of the router's HTTP port: what they may be, and that keys are never shown."""

import os
from pathlib import Path

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.node_settings import DecodeSettings, PrefillSettings
from pdserve.core.process_settings import ProcessSettings
from pdserve.core.router_settings import RouterSettings
from pdserve.core.settings import load_settings

NAMES = ("HTTP_PORT", "API_KEY", "CORS_ORIGIN", "API_KEYS_FILE", "ADMIN_PORT", "ADMIN_HOST")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"PDSERVE_{name}", raising=False)


def load(**given: str) -> RouterSettings:
    return load_settings(RouterSettings, given)


def test_the_port_has_a_default_and_can_be_off() -> None:
    assert load().http_port == 8000
    assert load(http_port="0").http_port == 0
    assert load(http_port="off").http_port is None


def test_keys_and_origins_are_lists_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "first-key, second-key")
    settings = load(cors_origin="https://a.example,http://localhost:3000,*")
    assert [key.get_secret_value() for key in settings.api_key] == ["first-key", "second-key"]
    assert settings.cors_origin == ("https://a.example", "http://localhost:3000", "*")
    assert "-key" not in repr(settings)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"http_port": "70000"}, "--http-port"),
        ({"http_port": "on"}, "--http-port"),
        ({"api_key": "ké-secret"}, "--api-key: must be printable ASCII"),
        ({"api_key": "my secret"}, "--api-key: must be printable ASCII"),
        ({"cors_origin": "example.com"}, "'example.com' is no origin"),
        ({"cors_origin": "https://a.example/path"}, "is no origin"),
    ],
)
def test_faults_are_named_and_keys_are_not(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(**given)
    assert words in str(error.value)
    assert "secret" not in str(error.value).replace("cluster_secret", "")


def test_a_keys_file_is_read_with_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for each in (path, tmp_path / "open"):
        each.write_text("ann use short-key\n")
        each.chmod(0o600 if each == path else 0o602)
    os.mkfifo(tmp_path / "pipe")
    assert len(load(api_keys_file=str(path)).keys_in(path.read_bytes())) == 1
    for given, words in (
        ({"host": "10.0.0.1", "cluster_secret": "s" * 16}, "line 1: the key must have at least 16 characters"),
        ({"api_key": "short-key"}, "line 1: this key is given as api_key too"),
        ({"api_keys_file": str(tmp_path / "none")}, "--api-keys-file: cannot be read (no such file or directory)"),
        ({"api_keys_file": str(tmp_path)}, "--api-keys-file: is no regular file"),
        ({"api_keys_file": str(tmp_path / "pipe")}, "--api-keys-file: is no regular file"),
        ({"api_keys_file": str(tmp_path / "open")}, "--api-keys-file: can be changed by other users; chmod 600 it"),
    ):
        with pytest.raises(ConfigError) as error:
            load(**({"api_keys_file": str(path)} | given))
        assert words in str(error.value)
        assert "short-key" not in str(error.value)


@pytest.mark.parametrize("kind", [RouterSettings, PrefillSettings, DecodeSettings])
def test_the_admin_port_is_off_and_on_loopback_unless_told_otherwise(kind: type[ProcessSettings]) -> None:
    settings = load_settings(kind, {})
    assert (settings.admin_port, settings.admin_host) == (None, "127.0.0.1")
    assert load_settings(kind, {"admin_port": "off"}).admin_port is None
    assert load_settings(kind, {"admin_port": "0", "admin_host": "10.0.0.1"}).admin_port == 0
    with pytest.raises(ConfigError, match="--admin-port"):
        load_settings(kind, {"admin_port": "on"})
    with pytest.raises(ConfigError, match="--admin-host"):
        load_settings(kind, {"admin_host": ""})
