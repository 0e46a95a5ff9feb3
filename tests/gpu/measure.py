"""How long the device takes, and what it can do at best: the yardsticks of every figure, measured in the same run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

GIB = float(1 << 30)
REPEATS = 20
HEAD_START_CYCLES = 4_000_000
"""About 2 ms at 2 GHz; a call's launches take less."""


def seconds(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median time of a call on the device, its caches swept before each."""
    if device.type != "cuda":  # for a dry run of this script
        call()
        return 1.0
    sweep = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        # The device has something to do until the host has launched all of the call: else its own launching would be measured.
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        sweep.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) / 1000)
    return float(sorted(times)[len(times) // 2])


@dataclass(frozen=True)
class Yardstick:
    """Bytes per second read and written by a large copy; floating-point operations per second of a bf16 matrix product."""

    copy_rate: float
    product_rate: float


def yardstick(device: torch.device, copied_bytes: int = 4 << 30, size: int = 8192) -> Yardstick:
    """Measure both."""
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product_s = seconds(lambda: a @ b, device)
    return Yardstick(2 * copied_bytes / copy_s, 2 * size**3 / product_s)
