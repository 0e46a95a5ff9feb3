"""`pdserve doctor`: what this machine has, what that means for pdserve, and what to do about it."""

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

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
    from pdserve.cli.report import errors_as_json, output, write_json

    findings = []
    with errors_as_json(as_json):
        for finding in examine():
            findings.append(finding)
            if not as_json:
                output().print(finding_view(finding))
    has_failed = any(finding.verdict is Verdict.FAIL for finding in findings)
    code = ExitCode.FAILED if has_failed else ExitCode.OK
    if as_json:
        write_json({"exit_code": code, "findings": [asdict(finding) for finding in findings]})
    raise typer.Exit(code)


def finding_view(finding: Finding) -> "RenderableType":
    """Return a finding with its advice below the fact, each wrapped within its column."""
    from rich.table import Table

    view = Table.grid()
    view.add_column(width=5, style=STYLES[finding.verdict])
    view.add_column(width=15, style="bold")
    view.add_column(overflow="fold")
    view.add_row(finding.verdict, finding.name, finding.fact)
    if finding.advice:
        advice = Table.grid()
        advice.add_column(width=2)
        advice.add_column(overflow="fold")
        advice.add_row("→", finding.advice)
        view.add_row("", "", advice)
    return view


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


def native() -> Iterator[Finding]:
    """The native operations, which compute on a CPU."""
    from pdserve.kernels.native.library import HOW_TO_BUILD, native_library, processor_flags, usable_sets

    library = native_library()
    if library is None:
        advice = f"{HOW_TO_BUILD}; until then torch alone computes, slower"
        yield Finding("native", Verdict.WARN, "not built for this processor", advice)
        return
    fact = f"{library.instruction_set}, the best of what was built for this processor"
    best = usable_sets(processor_flags())[0]
    advice = "" if best == library.instruction_set else f"{best} would be better: run `python kernels/build_native.py`"
    yield Finding("native", Verdict.OK, fact, advice)


def triton() -> Iterator[Finding]:
    """Triton, which only the GPU path uses."""
    if importlib.util.find_spec("triton") is None:
        advice = "nothing on a CPU; GPU kernels would fall to plain torch"
        yield Finding("triton", Verdict.OK, "not installed", advice)
    else:
        yield Finding("triton", Verdict.OK, version("triton"))


def compiler() -> Iterator[Finding]:
    """A C compiler: Triton builds with it what starts its kernels; the native operations are built when pdserve is installed."""
    import torch

    path = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if path is None:
        is_needed = torch.cuda.is_available()
        advice = (
            "GPU kernels cannot be started; install gcc" if is_needed else "needed only to build the native operations"
        )
        yield Finding("compiler", Verdict.WARN if is_needed else Verdict.OK, "none", advice)
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
    # A link that leads nowhere counts as there: nothing can be made in its place.
    above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=above):
            free = shutil.disk_usage(above).free
    except OSError as error:
        fact = f"{folder} cannot be {'written' if above == folder else 'made'} ({above}: {error.strerror})"
        yield Finding("cache", Verdict.FAIL, fact, "set PDSERVE_CACHE to a folder of yours")
        return
    short = free < 2 * GIB
    advice = "a model needs up to 2 GiB while it is prepared; set PDSERVE_CACHE elsewhere" if short else ""
    fact = f"{folder}, {free / GIB:.1f} GiB free"
    yield Finding("cache", Verdict.WARN if short else Verdict.OK, fact, advice)
    for alias in ALIASES.values():
        there = (prepared_dir(alias) / MANIFEST_NAME).is_file()
        advice = "" if there else f"`pdserve pull {alias.name}` prepares it; `up` and `demo` do so by themselves"
        yield Finding("model", Verdict.OK, f"{alias.name}: {'ready' if there else 'not prepared'}", advice)


def environment() -> Iterator[Finding]:
    """Variables that look like settings and are none."""
    from pdserve.core.settings import environment_warnings

    for name, words in environment_warnings().items():
        yield Finding("environment", Verdict.WARN, name, words.removeprefix(f"environment variable {name} "))


def ports() -> Iterator[Finding]:
    """The router's ports, and loopback itself."""
    from pdserve.core.router_settings import RouterSettings

    for name, field in (("router port", "port"), ("HTTP port", "http_port")):
        port = int(RouterSettings.model_fields[field].default)
        with socket.socket() as probe:
            probe.settimeout(1.0)
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        option = f"--{field.replace('_', '-')}"
        advice = f"`pdserve status` tells whether it is a cluster; `pdserve up {option}` takes another" if taken else ""
        fact = f"{port} {'is taken' if taken else 'is free'}"
        yield Finding(name, Verdict.WARN if taken else Verdict.OK, fact, advice)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    product,
    libraries,
    engine,
    native,
    triton,
    compiler,
    memory,
    models,
    environment,
    ports,
)
