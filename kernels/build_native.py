"""Compiles the native operations: one shared library per instruction set, beside their Python files.

    python kernels/build_native.py [--sanitize address,undefined|thread] [--into FOLDER]

Also a build hook of hatchling, so that a wheel and an editable install hold the libraries. It needs a C compiler (CC, else cc)
and nothing of pdserve. Without a compiler there are no libraries: pdserve then works with torch alone, slower, and says so.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).parent / "pdserve/kernels/native"
SETS = {
    "x86_64": {
        "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16"],
        "avx512": ["-march=x86-64-v4"],
        "avx2": ["-march=x86-64-v3"],
        "plain": [],
    },
}
"""Instruction sets by machine; on others "plain" alone."""
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]


def build(into: Path = NATIVE, extra: tuple[str, ...] = ()) -> list[Path]:
    """Compile for every instruction set of this machine; return the libraries.

    Raises FileNotFoundError without a compiler and subprocess.CalledProcessError where it fails.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise FileNotFoundError("no C compiler: neither CC nor cc, gcc or clang on the path")
    sources = sorted(str(source) for source in (NATIVE / "src").glob("*.c"))
    made, running = [], []
    for name, flags in SETS.get(platform.machine(), {"plain": []}).items():
        library = into / f"native_{name}.so"
        draft = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, *flags, *extra, *sources, "-lm", "-o", str(draft)]
        running.append((subprocess.Popen(command), command, draft, library))
    for process, command, _, _ in running:
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command)
    for _, _, draft, library in running:
        draft.replace(library)  # a process that has the old one loaded keeps it
        made.append(library)
    return made


def get_build_hook() -> type:
    """Return the hook: hatchling calls this, and only there its package can be imported."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there only while it builds
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            try:
                libraries = build()
            except (OSError, subprocess.CalledProcessError) as error:
                self.app.display_warning(f"pdserve: no native operations ({error}); torch alone will compute, slower")
                return
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            if version == "standard":
                build_data["force_include"] |= {
                    str(library): f"pdserve/kernels/native/{library.name}" for library in libraries
                }

    return NativeHook


def main() -> None:
    """Compile, with a sanitizer if asked, and print what was made."""
    arguments = argparse.ArgumentParser(description="compile pdserve's native operations")
    arguments.add_argument(
        "--sanitize", metavar="KIND", help="what the compiler is to check at run time: for finding faults"
    )
    arguments.add_argument("--into", type=Path, default=NATIVE, metavar="FOLDER")
    chosen = arguments.parse_args()
    extra = (f"-fsanitize={chosen.sanitize}", "-fno-sanitize-recover=all", "-g") if chosen.sanitize else ()
    try:
        libraries = build(chosen.into, extra)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"build_native: {error}")
    for library in libraries:
        sys.stdout.write(f"{library}\n")


if __name__ == "__main__":
    main()
