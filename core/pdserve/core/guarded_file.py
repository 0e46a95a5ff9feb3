"""Files that say who is let in: never one that other users could have written, and never a wait for a pipe."""

import os
import stat
from pathlib import Path

from pdserve.core.errors import ConfigError


def read_guarded(path: Path, max_bytes: int) -> tuple[bytes, int]:
    """Return the file's bytes, or `max_bytes` + 1 of a longer one, and its mode.

    Raises ConfigError with what is wrong, to follow the name of the file or of its setting.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(["is no regular file"])
            if mode & 0o022:
                raise ConfigError(["can be changed by other users; chmod 600 it"])
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(max_bytes + 1), stat.S_IMODE(mode)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError([f"cannot be read ({(error.strerror or str(error)).lower()})"]) from None
