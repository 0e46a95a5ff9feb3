"""The commands that run one process: threads are set before torch is there, and a failed start has its exit status."""

import os
import subprocess
import sys

import pytest

from pdserve.cli.exit_codes import ExitCode

DEADLINE_S = 120.0
SERVED = """
import os, sys, types
server = types.ModuleType("server")
async def serve(settings):
    assert "torch" not in sys.modules, "torch came before the threads were set"
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")
    print(type(settings).__name__, *(os.environ.get(name) for name in names))
server.serve = serve
for room in ("router", "prefill_node", "decode_node"):
    sys.modules[f"pdserve.{room}.server"] = server
from pdserve.cli.__main__ import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prefill", "--threads", "2"], "PrefillSettings 2 2 PASSIVE"),
        (["decode", "--threads", "1"], "DecodeSettings 1 1 None"),
        (["router"], "RouterSettings None None None"),
    ],
    ids=["prefill", "decode", "router"],
)
def test_threads_are_set_before_torch_is_imported(arguments: list[str], said: str) -> None:
    hidden = ("OMP_", "MKL_", "PDSERVE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run(
        [sys.executable, "-c", SERVED, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_process_that_cannot_have_its_model_ends_with_the_reason(role: str) -> None:
    command = [sys.executable, "-P", "-m", "pdserve.cli", role, "--port", "0", "--model", "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == ExitCode.MODEL
    last = [line for line in done.stderr.splitlines() if line.startswith("error: ")][-1]
    assert "no-such-model" in last
    assert "Traceback" not in done.stderr
