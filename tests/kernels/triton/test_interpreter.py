"""Check 1: the kernels in the checked interpreter, in processes whose Triton interprets.

Triton decides at import whether it interprets, and this process may want it to compile: each file runs in a child of its own.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import permutations, product
from pathlib import Path

import pytest

from tests.kernels.triton.pairwise import all_pairs

pytest.importorskip("triton", reason="triton is an optional extra: pip install pdserve[triton]")
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.mark.parametrize("file", sorted(path.name for path in (HERE / "interpreted").glob("test_*.py")))
def test_in_the_checked_interpreter(file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / "interpreted" / file)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, "nothing ran"


def test_every_pair_meets() -> None:
    table: dict[str, Sequence[object]] = {"a": (1, 2, 3), "b": "xy", "c": (None, True, 5, 7), "d": (0,)}
    cases = all_pairs(table)
    for (first, ones), (second, others) in permutations(table.items(), 2):
        met = {(case[first], case[second]) for case in cases}
        assert met == set(product(ones, others))
    assert len(cases) <= 14
