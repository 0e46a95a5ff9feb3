"""Standard streams as callers leave them: closed, in an encoding that lacks letters, on a full disk."""

import errno
import os
import sys
from typing import TextIO

WRITE_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""What writing to a stream fails with when there is no room for it, or its terminal is gone."""


def open_streams() -> None:
    """Lead closed streams nowhere, and have letters that a stream's encoding lacks written as escapes.

    A number that stays free would be given to the next socket, and what is said on that stream would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
        elif number and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def is_write_fault(error: OSError) -> bool:
    """Whether `error` tells of a stream that takes nothing; one of a named file says more by itself."""
    return error.filename is None and error.errno in WRITE_FAULTS
