"""Settings of the router's HTTP port: what they may be, and that keys are never shown."""

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.settings import RouterSettings, load_settings

NAMES = ("HTTP_PORT", "API_KEY", "CORS_ORIGIN")


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
