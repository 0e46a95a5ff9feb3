"""The tests of this folder once more, on libraries built to find what they do wrong in memory, arithmetic and threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cpu.libraries import LIBRARIES

ROOT = Path(__file__).parents[3]
FILES = [
    str(file.relative_to(ROOT)) for file in sorted(Path(__file__).parent.glob("test_*.py")) if file != Path(__file__)
]
RUN_ON = """
import sys
from pathlib import Path
import pytest
from pdserve.kernels.native import library
library.FOLDER = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "-x", "-s", *sys.argv[2:]]))
"""
RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not LIBRARIES, reason="no native operations were built: no C compiler"),
]


def build(kind: str, into: Path) -> str:
    """Build with a sanitizer; return what must be loaded before anything else."""
    script = ROOT / "kernels/build_native.py"
    subprocess.run([sys.executable, str(script), "--sanitize", kind, "--into", str(into)], check=True, timeout=300)
    found = []
    for name in RUNTIMES[kind]:
        done = subprocess.run(
            ["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True, timeout=10
        )
        if not Path(done.stdout.strip()).is_file():
            pytest.skip(f"the compiler has no {name}")
        found.append(done.stdout.strip())
    return ":".join(found)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_the_operations_tests_pass_under(kind: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "LD_PRELOAD": build(kind, tmp_path),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are none of ours
        "TSAN_OPTIONS": "report_signal_unsafe=0",
    }
    command = [sys.executable, "-c", RUN_ON, str(tmp_path), *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR: AddressSanitizer" not in done.stderr
    assert "WARNING: ThreadSanitizer" not in done.stderr
