# ruff: noqa: T201 - a command that prints
"""`make gpu`: what needs a GPU to be known. Ten minutes at most on one card; nothing is downloaded.

Each part is a process of its own, with a deadline: a fault that spoils the device for its process, or a library that is not
there, costs one part and hides no other. Without a GPU it says `not run` and ends well. Ends with 1 if an operation is wrong or a
part failed; figures below their target are printed, and do not fail. This script itself has not been run on a GPU yet.
"""

import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
BUDGET_S = 570.0
"""Under the ten minutes by what starting and ending take."""
LEAST_S = 30.0
PARTS = {"operations": 180.0, "two processes": 150.0, "bandwidth": 120.0, "steps of an 8B shape": 240.0}
"""Each part's own deadline, in seconds; the whole has `BUDGET_S`."""

RunPart = Callable[[str, float], int]
"""Takes a part and the seconds it has; returns its exit status, or raises TimeoutExpired."""


def conduct(run_part: RunPart, now: Callable[[], float] = time.monotonic) -> int:
    """Run all parts that the time allows, whatever becomes of each; return the exit status of the whole."""
    began_s, failed = now(), list[str]()
    for name, most_s in PARTS.items():
        left_s = BUDGET_S - (now() - began_s)
        if left_s < LEAST_S:
            print(f"{name}: left out, the ten minutes are gone", flush=True)
            continue
        try:
            status = run_part(name, min(most_s, left_s))
        except subprocess.TimeoutExpired as late:
            print(f"FAILED: {name}: not done after {late.timeout:.0f} s", flush=True)
            status = 1
        else:
            if status:
                print(f"FAILED: {name}: see above", flush=True)
        if status:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all parts that ran are right", flush=True)
    return int(bool(failed))


def in_a_process(name: str, most_s: float) -> int:
    """Run a part as a child, whose lines are printed as they come; what it started ends with it, however it ends."""
    roots = [str(folder.parent) for folder in sorted(ROOT.glob("*/pdserve"))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *roots, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.gpu", name]
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as child:
        try:
            return child.wait(most_s)
        finally:  # late, interrupted or crashed: its nodes would hold the device's memory
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def lines_of(name: str, device: torch.device) -> Iterable[str]:
    """Run a part here; its lines come as they are found."""
    if name == "operations":
        from tests.gpu.correctness import check_operations

        return check_operations(device)
    if name == "two processes":
        import asyncio

        from tests.gpu.two_nodes import answers_agree

        return asyncio.run(answers_agree())
    from tests.gpu.measure import yardstick

    best = yardstick(device)
    print(
        f"a copy: {best.copy_rate / 1e9:.0f} GB/s; a bf16 product: {best.product_rate / 1e12:.0f} TFLOP/s", flush=True
    )
    if name == "bandwidth":
        from tests.gpu.bandwidth import measure_bandwidth

        return measure_bandwidth(device, best)
    from tests.gpu.steps import measure_steps

    return measure_steps(device, best)


def main(arguments: Sequence[str]) -> int:
    """Run one part, or without arguments all of them."""
    if not torch.cuda.is_available():
        print("not run: no CUDA device here")
        return 0
    if arguments:
        is_wrong = False
        for line in lines_of(arguments[0], torch.device("cuda")):
            is_wrong |= line.startswith("WRONG")
            print(line, flush=True)
        return int(is_wrong)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    print(f"{today}, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    return conduct(in_a_process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
