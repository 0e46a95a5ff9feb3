"""The machine code of the kernels keeps inside its budgets. Compiled once and cached; the whole matrix has a command of its own.

`make test` compiles what `CI` names, since everything takes minutes the first time: `python -m tests.kernels.ahead_of_time`.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from tests.kernels.ahead_of_time.budgets import FILE, all_pairs, faults_of, measure
from tests.kernels.ahead_of_time.cases import CASES
from tests.kernels.ahead_of_time.launches import launches_of

CI = [
    ("decode bf16, heads of 128", "sm_80"),
    ("decode bf16, heads of 128", "sm_90"),
    ("decode bf16, heads of 128", "sm_100"),
    ("decode bf16, heads of 128", "gfx942"),
    ("decode merge", "sm_90"),
    ("prefill bf16, heads of 128", "sm_80"),
    ("prefill bf16, heads of 128", "sm_90"),
    ("prefill bf16, heads of 128", "sm_100"),
    ("KV write bf16", "sm_90"),
    ("pack", "sm_90"),
    ("RMSNorm + residual", "sm_90"),
    ("SiLU-mul", "sm_90"),
]


@pytest.mark.parametrize(("name", "target"), CI)
def test_machine_code_keeps_inside_its_budget(name: str, target: str) -> None:
    assert faults_of(name, target, measure(CASES[name], target)) == []


def test_every_pair_has_a_budget() -> None:
    import json

    budgets = json.loads(FILE.read_text())
    assert {(name, target) for name, by_target in budgets.items() for target in by_target} == set(all_pairs())


def test_every_kernel_of_the_room_has_a_case() -> None:
    """A new kernel without a case would never be compiled before it meets a GPU."""
    import importlib
    import pkgutil

    from triton.runtime.jit import JITFunction

    import pdserve.kernels.triton as room

    modules = [
        importlib.import_module(f"{room.__name__}.{found.name}") for found in pkgutil.iter_modules(room.__path__)
    ]
    kernels = {
        value.__name__
        for module in modules
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.__name__.endswith("_kernel")
    }
    launched = {launch.kernel.__name__ for case in CASES.values() for launch in launches_of(case.call)}
    assert kernels <= launched
    assert all(case.kernel in {launch.kernel.__name__ for launch in launches_of(case.call)} for case in CASES.values())


@pytest.mark.parametrize(
    ("fault", "figures"),
    [
        ("spills: 4", {"spills": 4}),
        ("registers: 999", {"registers": 999}),
        ("shared: 999999, 237568", {"shared": 999999}),
        ("wgmma: none", {"wgmma": 0}),
    ],
)
def test_a_budget_that_is_broken_is_named(fault: str, figures: dict[str, int]) -> None:
    sound = {"registers": 1, "shared": 0, "spills": 0, "wgmma": 1}
    found = faults_of("prefill bf16, heads of 128", "sm_90", sound | figures)
    assert any(fault.split(",", maxsplit=1)[0] in line for line in found)
    assert faults_of("prefill bf16, heads of 128", "sm_90", sound) == []
