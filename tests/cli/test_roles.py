"""The end of a service's process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import roles

Run = Callable[[dict[str, Any], Path | None], None]


@pytest.mark.parametrize(
    ("run", "statuses"), [(roles.run_prefill, [0]), (roles.run_decode, [0]), (roles.run_router, [])]
)
def test_a_node_leaves_before_torch_is_taken_down(
    run: Run, statuses: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seen: exit 134 of a node that was told to stop while it loaded its model, and seconds between "stopped" and the end."""
    left: list[int] = []
    monkeypatch.setattr(roles, "run_service", lambda serve, settings: None)
    monkeypatch.setattr(os, "_exit", left.append)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "1")
    run({}, None)
    assert left == statuses


@pytest.mark.parametrize(("given", "then"), [(None, "ERROR"), ("debug", "debug")])
def test_the_core_of_grpc_does_not_write_between_the_lines_of_the_log(
    given: str | None, then: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Seen among JSON lines: "I1129 … Got goaway", whenever a frozen peer woke up again."""
    monkeypatch.setenv("GRPC_VERBOSITY", given or "")
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    monkeypatch.setattr(roles, "run_service", lambda serve, settings: None)
    roles.run_router({}, None)
    assert os.environ["GRPC_VERBOSITY"] == then
