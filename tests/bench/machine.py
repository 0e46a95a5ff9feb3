"""What the numbers were measured on."""

import os
import platform
from importlib.metadata import version

from pdserve.core.build import product_version, source_commit

LIBRARIES = ("torch", "transformers", "grpcio", "pyzmq", "uvloop")


def describe_machine() -> dict[str, object]:
    """Return machine, versions and commit, for the head of a record."""
    model = "unknown"
    if os.path.exists("/proc/cpuinfo"):  # noqa: PTH110 - a probe, not a path of ours
        with open("/proc/cpuinfo", encoding="utf-8") as info:  # noqa: PTH123
            names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "pdserve": product_version(),
        "commit": source_commit(),
        **{name: version(name) for name in LIBRARIES},
    }


def quantile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the sorted values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
