"""One place chooses, by name, and says so."""

import logging
import sys

import pytest

from pdserve.core.errors import ConfigError
from pdserve.kernels.backends import BACKENDS, OPTIONAL, choose_backend
from pdserve.kernels.native import library
from pdserve.kernels.native.library import native_library


def test_the_choice_is_named_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    best = "native" if native_library() is not None else "torch-sdpa"
    with caplog.at_level(logging.INFO, "pdserve.kernels.backends"):
        assert choose_backend("cpu").name == best
    assert f"{best} on cpu" in caplog.text


def test_without_native_operations_torch_computes_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(BACKENDS, "native", raising=False)
    monkeypatch.delitem(sys.modules, OPTIONAL["native"][0], raising=False)
    monkeypatch.setattr(library, "usable_sets", lambda flags: [])
    native_library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert choose_backend("cpu").name == "torch-sdpa"
        assert "torch computes alone, slower" in caplog.text
        with pytest.raises(ConfigError, match=r"kernels/build_native\.py"):
            choose_backend("cpu", "native")
    finally:
        native_library.cache_clear()


@pytest.mark.parametrize(("device", "name"), [("abacus", None), ("cpu", "triton")])
def test_what_is_not_there_is_refused_by_name(device: str, name: str | None) -> None:
    with pytest.raises(ConfigError, match=name or device):
        choose_backend(device, name)
