# ruff: noqa: T201 - a command that prints
"""`make gpu`: what needs a GPU to be known. Ten minutes at most on one card; nothing is downloaded.

Without a GPU it says `not run` and ends well. Ends with 1 if an operation is wrong; figures below their target are printed, and
do not fail. This script itself has not been run on a GPU yet.
"""

import asyncio
import datetime
import sys
import time
from collections.abc import Callable

import torch

BUDGET_S = 600.0


def main() -> int:
    """Run all parts that the time allows, print a line each, and return the exit status."""
    if not torch.cuda.is_available():
        print("not run: no CUDA device here")
        return 0
    from tests.gpu.bandwidth import measure_bandwidth
    from tests.gpu.correctness import check_operations
    from tests.gpu.measure import yardstick
    from tests.gpu.steps import measure_steps
    from tests.gpu.two_nodes import answers_agree

    device, began_s = torch.device("cuda"), time.monotonic()
    best = yardstick(device)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    print(f"{today}, {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    print(f"a copy: {best.copy_rate / 1e9:.0f} GB/s; a bf16 product: {best.product_rate / 1e12:.0f} TFLOP/s")
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("operations", lambda: check_operations(device)),
        ("two processes", lambda: [asyncio.run(answers_agree())]),
        ("bandwidth", lambda: measure_bandwidth(device, best)),
        ("steps of an 8B shape", lambda: measure_steps(device, best)),
    ]
    lines: list[str] = []
    for name, part in parts:
        if time.monotonic() - began_s > BUDGET_S / 2:
            print(f"{name}: left out, half of the ten minutes is gone")
            continue
        for line in part():
            lines.append(line)
            print(line, flush=True)
    return int(any(line.startswith("WRONG") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
