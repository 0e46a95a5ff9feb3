"""Finds the native library for this processor and loads it."""

import ctypes
import logging
import platform
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pdserve.kernels.native.structures import ChunkStruct, OperationStruct, StepStruct

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
HOW_TO_BUILD = "install a C compiler, then build them: python kernels/build_native.py"

AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NEEDS: dict[str, frozenset[str]] = {
    "avx512_bf16": AVX512 | {"avx512_bf16"},
    "avx512": AVX512,
    "avx2": AVX2,
    "plain": frozenset(),
}
"""Instruction sets, best first, and the processor's flags (as Linux names them) that each needs."""


@dataclass(frozen=True)
class NativeLibrary:
    """A loaded library. `c` holds the functions of tape.h and team.h."""

    instruction_set: str
    c: ctypes.CDLL

    @property
    def has_bf16_dot(self) -> bool:
        """Whether it multiplies bfloat16 numbers by themselves, two at a time."""
        return self.instruction_set == "avx512_bf16"

    def new_team(self, num_threads: int) -> int:
        """Start a team of threads, the caller's counted; `c.team_free` ends it. Raises OSError if the system gives none."""
        team = self.c.team_new(num_threads)
        if not team:
            raise OSError(f"the system gives no {num_threads} threads")
        return int(team)


@cache
def native_library() -> NativeLibrary | None:
    """Return the library for the best instruction set of this processor; None, with a line in the log, if none was built."""
    best = next((name for name in usable_sets(processor_flags()) if _path(name).is_file()), None)
    if best is None:
        log.warning("no native operations were built for this processor: torch computes alone, slower")
        return None
    return load_library(_path(best), best)


def load_library(path: Path, instruction_set: str) -> NativeLibrary:
    """Load one library; raise OSError if it cannot be loaded or was compiled from other sources than these structs."""
    c = ctypes.CDLL(str(path))
    sizes = (ctypes.c_int32 * 3)()
    c.tape_sizes(sizes)
    ours = [ctypes.sizeof(struct) for struct in (OperationStruct, StepStruct, ChunkStruct)]
    if list(sizes) != ours:
        raise OSError(f"{path} has structs of {list(sizes)} bytes, {ours} are expected: build it again")
    c.team_new.argtypes = [ctypes.c_int]
    c.team_new.restype = ctypes.c_void_p
    c.team_free.argtypes = [ctypes.c_void_p]
    c.team_free.restype = None
    c.tape_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    c.tape_run.restype = None
    return NativeLibrary(instruction_set, c)


def usable_sets(flags: Collection[str]) -> list[str]:
    """Return the instruction sets that a processor with these flags has, best first."""
    return [name for name, needed in NEEDS.items() if needed <= set(flags)]


def processor_flags() -> frozenset[str]:
    """Return the flags of this machine's processor; none where the system does not tell them (then "plain" is used)."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    stated = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(stated.partition(":")[2].split())


def _path(instruction_set: str) -> Path:
    return FOLDER / f"native_{instruction_set}.so"
