"""A few of the seeded faults are seen, and all of them still fit the source; `mutants` tries them all."""

from pathlib import Path

import pytest

from tests.kernels.triton.mutants import EQUAL, MUTANTS, Mutant, source_of, verdict

SOME = [mutant for kernel in ("split", "merge", "prefill") for mutant in [m for m in MUTANTS if m.kernel == kernel][:3]]


@pytest.mark.parametrize("mutant", SOME, ids=str)
def test_a_fault_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    assert verdict(mutant, tmp_path)


def test_every_fault_fits_the_source() -> None:
    for mutant in (*MUTANTS, *EQUAL):
        compile(source_of(mutant), "mutant", "exec")
