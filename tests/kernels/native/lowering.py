"""Triton kernels run natively on this machine's x86, lowered by the stock wheel of triton 3.7.1.

What a GPU is given is made from the same source by the same frontend and the same passes of the Triton dialect; only the last
part differs. The AMD passes lower the kernel for one warp of one thread, so that a whole tensor lies in one thread and a matrix
product becomes scalar multiply-adds; the textual LLVM IR is cleaned of what only a GPU has; the wheel's LLVM also has an x86 code
generator, which makes an object file; a loop in C walks the grid.

`substituted()` puts this in the place of Triton's own launch, so that unmodified launchers run on CPU tensors. It proves what the
kernels compute. It proves nothing about speed, races between programs or the numerics of matrix units.

This relies on private bindings of one version: `reason_not_here` says why it cannot run elsewhere. Not lowered: atomics and
inline assembly.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

TRITON_VERSION = "3.7.1"
ARCHITECTURE = "gfx942"
"""Whose passes are borrowed; no such machine is meant."""
TRIPLE = "x86_64-unknown-linux-gnu"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pdserve" / "native-triton"

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
SCALARS: Mapping[str, tuple[str, Any]] = {
    "i1": ("_Bool", ctypes.c_bool),
    "i32": ("int", ctypes.c_int32),
    "i64": ("long long", ctypes.c_int64),
    "u64": ("unsigned long long", ctypes.c_uint64),
    "fp32": ("float", ctypes.c_float),
}
"""Triton's name of a scalar's type → its name in C, and in ctypes."""

# The few device functions that remain, by what they compute.
MATHS = """
#include <math.h>
double native_log_f64(double x) { return log(x); }
float native_rsq_f32(float x) { return 1.0f / sqrtf(x); }
float native_rcp_f32(float x) { return 1.0f / x; }
float native_sqrt_f32(float x) { return sqrtf(x); }
float native_exp_f32(float x) { return expf(x); }
float native_exp2_f32(float x) { return exp2f(x); }
float native_log_f32(float x) { return logf(x); }
float native_log2_f32(float x) { return log2f(x); }
float native_ceil_f32(float x) { return ceilf(x); }
float native_floor_f32(float x) { return floorf(x); }
float native_rint_f32(float x) { return rintf(x); }
float native_tanh_f32(float x) { return tanhf(x); }
float native_fmed3_f32(float a, float b, float c) { return fmaxf(fminf(fmaxf(a, b), c), fminf(a, b)); }
unsigned native_mul_hi_u32(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
/* float32 to bfloat16, nearest even, for processors without the instruction; the answer lies in the low half. */
float __truncsfbf2(float x) {
    union { float real; unsigned bits; } in = {x}, out;
    unsigned rounded = in.bits + 0x7fff + ((in.bits >> 16) & 1);
    out.bits = x == x ? rounded >> 16 : (in.bits >> 16) | 0x40;
    return out.real;
}
"""


class NotLowered(Exception):
    """The kernel needs something of a GPU for which this module has no counterpart."""


@cache
def reason_not_here() -> str | None:
    """Return why kernels cannot run natively on this machine, in a line, or None where they can."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return "TRITON_INTERPRET=1: kernels are interpreted in this process"
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return f"native check: needs x86-64 Linux, this is {sys.platform} on {os.uname().machine}"
    try:
        found = version("triton")
    except PackageNotFoundError:
        found = "none"
    if found != TRITON_VERSION:
        return f"native check: needs the wheel of triton {TRITON_VERSION} (private bindings), found {found}"
    try:
        subprocess.run(["gcc", "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "native check: needs gcc"
    return None


@dataclass(frozen=True)
class Signature:
    """The types of one launch: `types` of all arguments but the constants, in order; and the constants."""

    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]


@contextmanager
def substituted() -> Iterator[None]:
    """Let `kernel[grid](…)` run natively on CPU tensors, whatever kernel, in this process, inside the `with` block."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: object, grid: Any, warmup: bool, **keywords: object) -> None:
        del warmup
        bound = kernel.signature.bind(*arguments, **{k: v for k, v in keywords.items() if k in kernel.arg_names})
        bound.apply_defaults()
        extent = grid(bound.arguments) if callable(grid) else grid
        launch(kernel, extent, bound.arguments)

    before = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = before


def launch(kernel: Any, grid: Sequence[int], arguments: Mapping[str, object]) -> None:
    """Run a `@triton.jit` kernel over `grid` (one to three numbers); `arguments` by name, constants included."""
    signature = signature_of(kernel, arguments)
    x, y, z = (*grid, 1, 1)[:3]
    if min(x, y, z) > 0:
        _compiled(kernel, signature)(x, y, z, *(_as_c(arguments[name], kind) for name, kind in signature.types))


def signature_of(kernel: Any, arguments: Mapping[str, object]) -> Signature:
    """Return the types of one launch as Triton's own launch would find them, without its specialisation of values."""
    types, constants = list[tuple[str, str]](), list[tuple[str, object]]()
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            constants.append((parameter.name, getattr(value, "value", value)))
        else:
            types.append((parameter.name, _type_of(value)))
    return Signature(tuple(types), tuple(constants))


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise NotLowered(f"a tensor on {value.device}: native kernels read the CPU's memory")
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
    if isinstance(value, float):
        return "fp32"
    raise NotLowered(f"an argument of type {type(value).__name__}")


def _as_c(value: Any, kind: str) -> object:
    return ctypes.c_void_p(value.data_ptr()) if kind[0] == "*" else SCALARS[kind][1](value)


_libraries: dict[tuple[str, Signature], Callable[..., None]] = {}


def _compiled(kernel: Any, signature: Signature) -> Callable[..., None]:
    """Return the grid loop of the kernel as a C function, from the cache or made now."""
    known = _libraries.get((kernel.cache_key, signature))
    if known is None:
        file = CACHE / f"{kernel.__name__}-{_digest(kernel, signature)}.so"
        if not file.is_file():
            _build(to_x86(lower(kernel, signature)), signature, file)
        known = cast(Callable[..., None], ctypes.CDLL(str(file)).walk_grid)
        _libraries[kernel.cache_key, signature] = known
    return known


def _digest(kernel: Any, signature: Signature) -> str:
    """Name a build by all that goes into it: the kernel and what it calls, the types, this module, the processor."""
    parts = (kernel.cache_key, repr(signature), Path(__file__).read_text(), TRITON_VERSION, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    return "x86-64-v4" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "x86-64-v3"


def lower(kernel: Any, signature: Signature) -> str:
    """Return the LLVM IR of a kernel for one warp of one thread, as the AMD passes make it."""
    from triton._C.libtriton import amd, ir, llvm, passes
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = dict(signature.constants)
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else dict(signature.types)[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("hip", ARCHITECTURE, 64)
    backend = HIPBackend(target)
    options = backend.parse_options({"num_warps": 1, "num_stages": 1})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    module = HIPBackend.make_ttir(module, {}, options)
    _run_passes(
        module,
        lambda manager: passes.ttir.add_convert_to_ttgpuir(manager, f"hip:{ARCHITECTURE}", 1, 1, 1),
        passes.ttgpuir.add_remove_layout_conversions,
        *(passes.common.add_canonicalizer, passes.common.add_cse, passes.common.add_symbol_dce),
    )
    _run_passes(
        module,
        *(passes.convert.add_scf_to_cf, passes.gluon.add_inliner, passes.convert.add_index_to_llvmir),
        amd.passes.ttgpuir.add_allocate_shared_memory,
        lambda manager: amd.passes.ttgpuir.add_to_llvmir(manager, ARCHITECTURE, True),
        *(passes.common.add_canonicalizer, passes.common.add_cse),
        *(passes.convert.add_cf_to_llvmir, passes.convert.add_arith_to_llvmir),
        *(passes.common.add_canonicalizer, passes.common.add_cse, passes.common.add_symbol_dce),
        lambda manager: amd.passes.ttgpuir.add_builtin_func_to_llvmir(manager, ARCHITECTURE, True),
    )
    llvm.init_targets()
    llvm_context = llvm.context()
    return str(llvm.to_module(module, llvm_context))


def _run_passes(module: Any, *stages: Callable[[Any], None]) -> None:
    from triton._C.libtriton import ir

    manager = ir.pass_manager(module.context)
    for add in stages:
        add(manager)
    manager.run(module, "native")


CALL = r"(?:tail )?call (?:\w+ |range\([^)]*\) )*"


def to_x86(text: str) -> str:
    """Clean LLVM IR of what only a GPU has; raise NotLowered for what has no counterpart here."""
    text = re.sub(r"addrspace\(\d+\) ?", "", text)
    text = re.sub(r"^target (datalayout|triple).*$", "", text, flags=re.MULTILINE)
    # By line: in texts of megabytes few lines hold any of it, and the patterns are slow.
    text = "\n".join(_line_to_x86(line) if "@llvm.amdgcn." in line else line for line in text.split("\n"))
    text += "".join(f"\n@pid_{axis} = external thread_local global i32\n" for axis in "xyz")
    text = re.sub(
        r"^@global_smem = external (?:unnamed_addr )?global \[0 x i8\].*$",
        f"@global_smem = internal thread_local global [{1 << 18} x i8] zeroinitializer, align 64",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"@__ocml_(\w+)_f(32|64)", r"@native_\1_f\2", text)
    text = text.replace("@__ockl_mul_hi_u32", "@native_mul_hi_u32")
    left = set(re.findall(r"@(llvm\.amdgcn[\w.]+|__oc\w+|native_\w+)", text))
    left -= set(re.findall(r"native_\w+", MATHS))
    if left:
        raise NotLowered(f"no counterpart on x86 of {', '.join(sorted(left))}")
    return text


def _line_to_x86(line: str) -> str:
    """Clean a line that names a device's own function."""
    line = re.sub(rf"{CALL}i32 @llvm\.amdgcn\.workgroup\.id\.([xyz])\(\)", r"load i32, ptr @pid_\1", line)
    line = re.sub(rf"{CALL}i32 @llvm\.amdgcn\.workitem\.id\.[xyz]\(\)", "add i32 0, 0", line)
    line = re.sub(_DOT2, _multiply_pairs, line)
    line = line.replace("@llvm.amdgcn.log.f32", "@native_log2_f32")  # the device's logarithm is of base 2
    line = re.sub(r"@llvm\.amdgcn\.(rsq|rcp|exp2|sqrt|fmed3)\.f32", r"@native_\1_f32", line)
    # One thread waits for nobody, and has no mode register; what a device declares is declared nowhere else.
    needless = r"^declare .*@llvm\.amdgcn\.|void @llvm\.amdgcn\.(s\.barrier|s\.waitcnt|sched\.|iglp\.opt|s\.setreg)"
    return "" if re.search(needless, line) else line


_DOT2 = (
    rf"^ *(?P<name>%[\w.]+) = {CALL}float @llvm\.amdgcn\.fdot2(?:\.f32\.bf16)?\("
    r"<2 x (?P<type>bfloat|half)> (?P<a>.+?), <2 x (?:bfloat|half)> (?P<b>.+?), float (?P<c>.+?), i1 \w+\)(?: #\d+)?$"
)


def _multiply_pairs(found: "re.Match[str]") -> str:
    """Write `a0 b0 + a1 b1 + c` of 16-bit pairs in float32."""
    name, kind = found["name"], found["type"]
    part = f"%pair.{name[1:]}"
    return f"""
  {part}.a = fpext <2 x {kind}> {found["a"]} to <2 x float>
  {part}.b = fpext <2 x {kind}> {found["b"]} to <2 x float>
  {part}.m = fmul <2 x float> {part}.a, {part}.b
  {part}.0 = extractelement <2 x float> {part}.m, i32 0
  {part}.1 = extractelement <2 x float> {part}.m, i32 1
  {part}.s = fadd float {part}.0, {found["c"]}
  {name} = fadd float {part}.s, {part}.1"""


def _build(text: str, signature: Signature, file: Path) -> None:
    """Compile the IR and link it with the loop over the grid into the shared library `file`."""
    from triton._C.libtriton import llvm

    found = re.search(r"^define (?:\w+ )*void @(\w+)\(", text, re.MULTILINE)
    assert found is not None
    with _plain_code():
        machine_code = llvm.translate_to_asm(text, TRIPLE, _processor(), "", [], True, True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        (folder / "kernel.o").write_bytes(machine_code)
        (folder / "grid.c").write_text(MATHS + _grid_loop(found[1], signature))
        parts = [str(folder / part) for part in ("grid.c", "kernel.o")]
        subprocess.run(
            ["gcc", "-O2", "-shared", "-fPIC", "-o", str(folder / "kernel.so"), *parts, "-lm"],
            check=True,
            capture_output=True,
        )
        (folder / "kernel.so").rename(file)  # whole or not at all: others may build the same


@contextmanager
def _plain_code() -> Iterator[None]:
    """Let LLVM emit code without optimising it: straight-line code of a hundred thousand lines then takes seconds, not hours.

    The wheel has no argument for it, and reads this variable at each call. What the kernel computes is not touched by it.
    """
    with mock.patch.dict(os.environ, {"DISABLE_LLVM_OPT": "1"}):
        yield


def _grid_loop(name: str, signature: Signature) -> str:
    kinds = ["void *" if kind[0] == "*" else SCALARS[kind][0] for _, kind in signature.types]
    parameters = ", ".join(f"{kind} a{index}" for index, kind in enumerate(kinds))
    arguments = ", ".join(f"a{index}" for index in range(len(kinds)))
    # The two pointers at the end are scratch memory, which one thread does not use.
    return f"""
_Thread_local int pid_x, pid_y, pid_z;
void {name}({parameters}, void *, void *);
void walk_grid(int size_x, int size_y, int size_z, {parameters}) {{
    for (int z = 0; z < size_z; z++)
        for (int y = 0; y < size_y; y++)
            for (int x = 0; x < size_x; x++) {{
                pid_x = x; pid_y = y; pid_z = z;
                {name}({arguments}, 0, 0);
            }}
}}
"""
