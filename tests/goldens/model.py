"""The default model for tests: prepared on first use, as `pdserve pull` would."""

import sys
from functools import cache
from pathlib import Path

from pdserve.engine.prepare import prepare_model
from tests.goldens.goldens import MODEL


@cache
def default_model_dir() -> Path:
    """Return the folder of the converted default model; raises ModelUnavailable with what to do."""
    return prepare_model(MODEL, _report)


def _report(what: str, share: float) -> None:
    if share in (0.0, 1.0) and what != "ready":
        sys.stderr.write(f"model: {what} {share:.0%}\n")
