"""Who this process is: version, source commit, role, incarnation and what its engine computes with."""

import os
import subprocess
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pdserve.core.ids import Incarnation


class Role(IntEnum):
    """A process's part in the service; the values are those of the contract."""

    ROUTER = 1
    PREFILL = 2
    DECODE = 3

    @property
    def label(self) -> str:
        """The role's name as people write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A running process. Engine fields are empty or 0 on a router."""

    role: Role
    incarnation: Incarnation
    version: str
    commit: str
    dtype: str = ""
    threads: int = 0
    block_size: int = 0
    weight_digest: str = ""
    device: str = ""
    attention_backend: str = ""


def process_as_json(info: ProcessInfo) -> dict[str, object]:
    """Return a process's facts as JSON values."""
    return asdict(info) | {"role": info.role.label, "incarnation": info.incarnation.hex()}


@cache
def product_version() -> str:
    """Return the installed version of pdserve."""
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "0+unknown"


@cache
def source_commit() -> str:
    """Return PDSERVE_COMMIT, or the commit of the checkout that this file lies in (`+` if changed), or "unknown"."""
    stated = os.environ.get("PDSERVE_COMMIT")
    if stated:
        return stated
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
