"""One place chooses, by name, and says so."""

import logging

import pytest

from pdserve.core.errors import ConfigError
from pdserve.kernels.backends import choose_backend


def test_the_choice_is_named_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.kernels.backends"):
        assert choose_backend("cpu").name == "torch-sdpa"
    assert "torch-sdpa on cpu" in caplog.text


@pytest.mark.parametrize(("device", "name"), [("abacus", None), ("cpu", "triton")])
def test_what_is_not_there_is_refused_by_name(device: str, name: str | None) -> None:
    with pytest.raises(ConfigError, match=name or device):
        choose_backend(device, name)
