"""Compile a launch for a GPU that is not here, and read from the machine code what it takes.

The wheel of triton carries the assembler and the disassembler for NVIDIA; AMD's figures stand in the assembly text. Compiled as
the launch would be on that target, with its specialisation to the values of the arguments (alignment above all).
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.kernels.ahead_of_time.launches import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program can have."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pdserve" / "ahead-of-time"

Figures = dict[str, int]
"""registers, spills (instructions or registers), shared (bytes), instructions; and counts of instructions by kind:
matrix (any matrix product), wgmma (HGMMA of sm_90), tcgen05 (UTCMMA of sm_100), async128 (16-byte copies to shared memory that
do not wait), load128 and store128 (16-byte loads and stores), loads (all from global memory)."""

NVIDIA_KINDS = {
    "matrix": r"(HMMA|IMMA|QMMA|DMMA|[HQI]GMMA|UTC\w*MMA)",
    "wgmma": r"[HQI]GMMA",
    "tcgen05": r"UTC\w*MMA",
    "async128": r"LDGSTS\S*\.128",
    "load128": r"LDG(?!STS)\S*\.128",
    "store128": r"STG\S*\.128",
    "loads": r"LDG",
    "spills": r"(LDL|STL)",
}
AMD_KINDS = {
    "matrix": r"v_(mfma|smfmac)",
    "load128": r"(global|buffer)_load_(dwordx4|b128)",
    "store128": r"(global|buffer)_store_(dwordx4|b128)",
    "loads": r"(global|buffer)_load",
}


def figures_of(launch: Launch, target: str) -> Figures:
    """Return the figures of a launch on a target; from the cache if nothing that they depend on has changed."""
    source, options = _source_of(launch, TARGETS[target])
    parts = (source.hash(), repr(sorted(options.items())), target, triton.__version__, Path(__file__).read_text())
    file = CACHE / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.json"
    if file.is_file():
        known: Figures = json.loads(file.read_text())
        return known
    compiled: Any = triton.compile(source, target=TARGETS[target], options=options)
    figures = _amd(compiled) if target.startswith("gfx") else _nvidia(compiled)
    figures["shared"] = int(compiled.metadata.shared)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=CACHE, delete=False) as whole:
        json.dump(figures, whole)
    Path(whole.name).rename(file)
    return figures


def _source_of(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, given = bind(**launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(
        backend, {**launch.options, "debug": False}, bound, specialization, given
    )
    return ASTSource(kernel, signature, constants, attributes), options.__dict__


def _nvidia(compiled: Any) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([TOOLS / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", code, re.MULTILINE)
    figures = {kind: sum(bool(re.match(pattern, name)) for name in names) for kind, pattern in NVIDIA_KINDS.items()}
    return figures | {"registers": _number(r"REG:(\d+)", usage), "instructions": len(names)}


def _amd(compiled: Any) -> Figures:
    text = compiled.asm["amdgcn"]
    figures = {kind: len(re.findall(rf"^\s+{pattern}", text, re.MULTILINE)) for kind, pattern in AMD_KINDS.items()}
    # Scalar registers spill to lanes of vector registers, not to memory: they are counted in those.
    return figures | {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", text),
        "spills": _number(r"\.vgpr_spill_count:\s+(\d+)", text),
        "instructions": len(re.findall(r"^\s+[vs]_\w+|^\s+(?:global|buffer|ds)_\w+", text, re.MULTILINE)),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in what the tool says"
    return int(found[1])
