"""What `make gpu` does about parts that fail; what the parts find needs a GPU."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import BUDGET_S, PARTS, conduct, in_a_process


def test_a_part_that_fails_or_hangs_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def run(name: str, most_s: float) -> int:
        asked.append(name)
        if name == "two processes":
            raise subprocess.TimeoutExpired(name, most_s)
        return int(name == "operations")

    assert conduct(run) == 1
    assert asked == list(PARTS)
    assert "failed: operations, two processes" in capsys.readouterr().out


def test_all_is_well_where_no_part_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert conduct(lambda *_: 0) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_the_whole_ends_within_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    clock, given = [0.0], list[float]()

    def run(name: str, most_s: float) -> int:
        given.append(most_s)
        clock[0] += most_s + 50.0
        return 0

    assert conduct(run, lambda: clock[0]) == 0
    assert sum(given) <= BUDGET_S
    assert "steps of an 8B shape: left out" in capsys.readouterr().out


def test_what_a_crashed_part_had_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nodes of a part that died kept their memory of the device: the next part measured beside them, or had no room."""
    pipe, python = tmp_path / "open while one lives", tmp_path / "python"
    os.mkfifo(pipe)
    python.write_text(f"#!/bin/sh\nexec 3> '{pipe}'\nsleep 20 &\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert in_a_process("operations", 10.0) == 3
        assert select.select([reader], [], [], 5.0)[0], "its child lives on"
    finally:
        os.close(reader)
