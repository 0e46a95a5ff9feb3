"""The checked-in budgets, and what a kernel's figures are held to."""

import json
from pathlib import Path

from tests.kernels.ahead_of_time.cases import CASES, Case
from tests.kernels.ahead_of_time.figures import SHARED_LIMIT, TARGETS, Figures, figures_of
from tests.kernels.ahead_of_time.launches import launches_of

FILE = Path(__file__).with_name("budgets.json")
HEADROOM = 1.25
"""Room over what was measured: figures move by a quarter and more between versions of the compiler."""


def measure(case: Case, target: str) -> Figures:
    """Compile one case for one target."""
    launch = next(launch for launch in launches_of(case.call) if launch.kernel.__name__ == case.kernel)
    return figures_of(launch, target)


def faults_of(name: str, target: str, figures: Figures) -> list[str]:
    """Return what is wrong with the figures of a case, each in a line."""
    budget = json.loads(FILE.read_text()).get(name, {}).get(target)
    if budget is None:
        return [f"{name} on {target} has no budget; write it with python -m tests.kernels.ahead_of_time --write"]
    faults = [
        f"{kind}: {figures[kind]}, {limit} allowed"
        for kind, limit in (("registers", budget["registers"]), ("shared", budget["shared"]))
        if figures[kind] > limit
    ]
    if figures["spills"]:
        faults.append(f"spills: {figures['spills']}")
    if figures["shared"] > SHARED_LIMIT[target]:
        faults.append(f"shared: {figures['shared']}, {target} has {SHARED_LIMIT[target]}")
    faults += [f"{kind}: none" for kind in CASES[name].needs.get(target, ()) if not figures.get(kind)]
    return [f"{name} on {target}: {fault}" for fault in faults]


def write_budgets(figures: dict[tuple[str, str], Figures]) -> None:
    """Write budgets from what was measured."""
    budgets: dict[str, dict[str, Figures]] = {}
    for (name, target), measured in figures.items():
        most = 512 if target.startswith("gfx") else 255
        registers = min(most, 8 * -(-int(measured["registers"] * HEADROOM) // 8))
        budgets.setdefault(name, {})[target] = {
            "registers": registers,
            "shared": min(SHARED_LIMIT[target], int(measured["shared"] * HEADROOM)),
        }
    lines = [f"{json.dumps(name)}: {json.dumps(budget)}" for name, budget in budgets.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def all_pairs() -> list[tuple[str, str]]:
    """Return every case with every target for which it compiles."""
    return [(name, target) for name, case in CASES.items() for target in TARGETS if target not in case.without]
