"""Children that never outlive their parent, however it dies.

The child asks the kernel, before anything else, to be killed when its parent dies (`prctl(2)`, PR_SET_PDEATHSIG), and then looks
whether the parent died before it could ask. The kernel watches the parent's *thread*, so the thread that starts a child waits
for it. A child of ours calls `die_with_parent`, with its parent in PDSERVE_PARENT_PID; a foreign program is started through
`tied`, which runs this file to ask on its behalf (the wish survives `exec`).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PARENT_VARIABLE = "PDSERVE_PARENT_PID"
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Tie this process's life to the parent that PDSERVE_PARENT_PID names; nothing happens without the variable.

    Only Linux has the call; elsewhere a supervisor that is killed outright leaves its children, and `doctor` says so.
    """
    stated = os.environ.pop(PARENT_VARIABLE, None)
    if stated is not None:
        _die_with(stated)


def tied(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command`, an absolute path and its arguments, as a child that dies with this process.

    The process that it starts becomes `command`: same process id, streams and environment.
    """
    # By path and without site packages: neither what is installed nor PYTHONPATH has a say, and it starts in milliseconds.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _die_with(parent_pid: str) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if str(os.getppid()) != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _die_with(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is what is wanted
