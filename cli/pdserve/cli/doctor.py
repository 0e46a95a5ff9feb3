"""`pdserve doctor`: what this machine has, what that means for pdserve, and what to do about it."""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from pdserve.cli.exit_codes import ExitCode

GIB = 1 << 30


class Verdict(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the machine. `advice` says what to do, or what it means."""

    name: str
    verdict: Verdict
    fact: str
    advice: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Examine this machine. The exit status is 1 if something will not work."""
    from rich.text import Text

    from pdserve.cli.report import output, write_json

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            line = Text.assemble(
                (f"{finding.verdict:<5}", STYLES[finding.verdict]), (f"{finding.name:<15}", "bold"), finding.fact
            )
            output().print(line.append(f"\n{'':20}→ {finding.advice}" if finding.advice else ""))
    if as_json:
        write_json({"findings": [asdict(finding) for finding in findings]})
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def examine() -> Iterator[Finding]:
    """Yield every finding. A check that itself fails is a finding."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - a broken library is what this command is there to find
            yield Finding(check.__name__, Verdict.FAIL, f"{type(error).__name__}: {error}", "run `make setup` again")


def product() -> Iterator[Finding]:
    """Pdserve and Python."""
    from pdserve.core.build import product_version, source_commit

    yield Finding("pdserve", Verdict.OK, f"{product_version()} ({source_commit()})")
    old = sys.version_info < (3, 11)
    advice = "pdserve needs Python 3.11 or newer" if old else ""
    yield Finding("python", Verdict.FAIL if old else Verdict.OK, platform.python_version(), advice)
    is_linux = sys.platform == "linux"
    advice = "" if is_linux else "a supervisor that is killed outright leaves its processes; made for Linux"
    yield Finding(
        "system", Verdict.OK if is_linux else Verdict.WARN, f"{platform.system()} {platform.machine()}", advice
    )


def libraries() -> Iterator[Finding]:
    """The libraries that every process needs."""
    found, missing = [], []
    for name in ("transformers", "tokenizers", "safetensors", "gguf", "grpcio", "pyzmq", "uvloop", "xxhash"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding("libraries", Verdict.FAIL, f"missing: {', '.join(missing)}", "run `make setup`")
    yield Finding("libraries", Verdict.OK, ", ".join(found))


def engine() -> Iterator[Finding]:
    """Torch and its devices."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("torch", Verdict.OK, f"{torch.__version__}, CPU kernels {capability}")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("devices", Verdict.OK, ", ".join(names))
    else:
        yield Finding(
            "devices", Verdict.OK, "cpu only", "models run in float32 on the CPU; small ones are quick enough"
        )


def triton() -> Iterator[Finding]:
    """Triton, which only the GPU path uses."""
    if importlib.util.find_spec("triton") is None:
        advice = "nothing on a CPU; GPU kernels would fall to plain torch"
        yield Finding("triton", Verdict.OK, "not installed", advice)
    else:
        yield Finding("triton", Verdict.OK, version("triton"))


def compiler() -> Iterator[Finding]:
    """A C++ compiler, which native operators are built with."""
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if path is None:
        yield Finding("compiler", Verdict.WARN, "none", "native CPU operators cannot be built; install g++")
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    yield Finding("compiler", Verdict.OK, done.stdout.partition("\n")[0] or path)


def memory() -> Iterator[Finding]:
    """Cores, memory and shared memory."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = "" if cores > 1 else "prefill and decode will take turns on one core"
    yield Finding("cores", Verdict.OK if cores > 1 else Verdict.WARN, str(cores), advice)
    free = psutil.virtual_memory().available
    short = free < 3 * GIB
    advice = "the default cluster needs about 3 GiB; lower --kv-blocks, or close something" if short else ""
    yield Finding("memory", Verdict.WARN if short else Verdict.OK, f"{free / GIB:.1f} GiB free", advice)
    if not hasattr(os, "memfd_create"):
        yield Finding("shared memory", Verdict.WARN, "no memfd", "KV travels over TCP")
        return
    os.close(os.memfd_create("pdserve-doctor"))
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0  # noqa: PTH112, S108 - a mount, not a temporary file
    yield Finding("shared memory", Verdict.OK, f"memfd works, {shm / GIB:.1f} GiB free in /dev/shm")


def models() -> Iterator[Finding]:
    """The cache folder and what is in it."""
    from pdserve.core.models import ALIASES, MANIFEST_NAME, cache_dir, prepared_dir

    folder = cache_dir()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(above, os.W_OK):
        yield Finding("cache", Verdict.FAIL, f"{folder} cannot be written", "set PDSERVE_CACHE to a folder of yours")
    free = shutil.disk_usage(above).free
    short = free < 2 * GIB
    advice = "a model needs up to 2 GiB while it is prepared; set PDSERVE_CACHE elsewhere" if short else ""
    fact = f"{folder}, {free / GIB:.1f} GiB free"
    yield Finding("cache", Verdict.WARN if short else Verdict.OK, fact, advice)
    for alias in ALIASES.values():
        there = (prepared_dir(alias) / MANIFEST_NAME).is_file()
        advice = "" if there else f"`pdserve pull {alias.name}` prepares it; `up` and `demo` do so by themselves"
        yield Finding("model", Verdict.OK, f"{alias.name}: {'ready' if there else 'not prepared'}", advice)


def ports() -> Iterator[Finding]:
    """The router's port, and loopback itself."""
    from pdserve.core.settings import RouterSettings

    port = RouterSettings.model_fields["port"].default
    with socket.socket() as probe:
        probe.settimeout(1.0)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    advice = "`pdserve status` tells whether it is a cluster; `pdserve up --port` takes another" if taken else ""
    fact = f"{port} {'is taken' if taken else 'is free'}"
    yield Finding("router port", Verdict.WARN if taken else Verdict.OK, fact, advice)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    product,
    libraries,
    engine,
    triton,
    compiler,
    memory,
    models,
    ports,
)
