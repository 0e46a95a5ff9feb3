"""A secret that a supervisor made for its processes, handed on by an open file: never as an argument or in the environment.

Both would show it to every user of the machine, or to every program that a process starts. The file has no name and can be read
again and again, from its beginning: each process gets the same descriptor, also one that is started anew.
"""

import os
import secrets
import sys
import tempfile

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import ConfigError

MADE_BYTES = 32
MAX_BYTES = 4096


class HandedSecret:
    """A new secret, and the descriptor that hands it on. A context manager: it closes the descriptor."""

    def __init__(self) -> None:
        self.value = secrets.token_hex(MADE_BYTES).encode()
        self.fd = _nameless_file()
        os.pwrite(self.fd, self.value, 0)

    def __enter__(self) -> "HandedSecret":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def read_handed_secret(descriptor: int) -> ClusterSecret:
    """Return the secret behind a descriptor, and keep it from what this process starts. Raises ConfigError for none."""
    try:
        raw = os.pread(descriptor, MAX_BYTES, 0)
        os.set_inheritable(descriptor, False)
    except OSError as error:
        raise ConfigError([f"cannot be read ({(error.strerror or str(error)).lower()})"]) from None
    if not raw:
        raise ConfigError(["holds no secret"])
    return ClusterSecret(raw)


def _nameless_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("pdserve secret", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
