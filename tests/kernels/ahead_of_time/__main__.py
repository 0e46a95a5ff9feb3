# ruff: noqa: T201 - a command that prints
"""Print the table of registers, spills, shared memory and instructions of every kernel on every target.

    python -m tests.kernels.ahead_of_time [--write] [TEXT …]

`--write` rewrites the budgets from what was measured; TEXT keeps the cases whose name holds one of them. Ends with 1 on faults.
"""

import sys

from tests.kernels.ahead_of_time.budgets import all_pairs, faults_of, measure, write_budgets
from tests.kernels.ahead_of_time.cases import CASES

KINDS = ("registers", "spills", "shared", "matrix", "wgmma", "tcgen05", "async128", "load128", "store128", "loads")


def main(arguments: list[str]) -> int:
    """Measure, print, and hold against the budgets or rewrite them."""
    wanted = [text for text in arguments if not text.startswith("--")]
    pairs = [pair for pair in all_pairs() if not wanted or any(text in pair[0] for text in wanted)]
    print(f"| kernel | target | {' | '.join(KINDS)} |\n|---|---|{'---:|' * len(KINDS)}")
    figures = {}
    for name, target in pairs:
        measured = figures[name, target] = measure(CASES[name], target)
        print(f"| {name} | {target} | {' | '.join(str(measured.get(kind, '')) for kind in KINDS)} |", flush=True)
    if "--write" in arguments and not wanted:
        write_budgets(figures)
    faults = [fault for pair, measured in figures.items() for fault in faults_of(*pair, measured)]
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
