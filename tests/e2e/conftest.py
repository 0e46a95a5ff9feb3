"""The tiny model, once per session."""

from pathlib import Path

import pytest

from tests.e2e.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_without_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model without a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-base", seed=1, chat=False)
