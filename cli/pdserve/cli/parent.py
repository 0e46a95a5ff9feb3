"""Children that never outlive their supervisor, however it dies.

The supervisor puts its process id into PDSERVE_PARENT_PID; the child asks the kernel, before anything else, to be killed when
its parent dies (`prctl(2)`, PR_SET_PDEATHSIG), and then looks whether the parent died before it could ask. The kernel watches the
parent's *thread*, so the supervisor starts children from its main thread only.
"""

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "PDSERVE_PARENT_PID"
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Tie this process's life to the parent that PDSERVE_PARENT_PID names; nothing happens without the variable.

    Only Linux has the call; elsewhere a supervisor that is killed outright leaves its children, and `doctor` says so.
    """
    stated = os.environ.pop(PARENT_VARIABLE, None)
    if stated is None:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if str(os.getppid()) != stated:
        os.kill(os.getpid(), signal.SIGKILL)
