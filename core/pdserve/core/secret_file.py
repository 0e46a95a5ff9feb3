"""The file of the cluster secret: one value, or two while it is being changed, and what becomes of it when it changes."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.cluster_secret import MAX_VALUES, ClusterSecret
from pdserve.core.errors import ConfigError
from pdserve.core.guarded_file import read_guarded

MAX_FILE_BYTES = 64 << 10
SHORTEST_SECRET = 16
"""Characters of a secret that strangers could try to guess."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SecretContent:
    """What a file says, and what to warn of."""

    values: tuple[bytes, ...]
    warning: str = ""


def read_secret_file(path: Path, fewest_chars: int = 1) -> SecretContent:
    """Read one or two values, a line each; blank lines and those that begin with # do not count.

    Raises ConfigError with what is wrong, to follow the name of the setting. What others may change is refused. What others may
    read is only warned of: a secret that Kubernetes mounts has mode 0644, and no other users.
    """
    raw, mode = _content(path)
    lines = [line.strip() for line in raw.removeprefix(BYTE_ORDER_MARK).split(b"\n")]
    values = tuple(dict.fromkeys(line for line in lines if line and not line.startswith(b"#")))
    if not values:
        raise ConfigError([f"{path} holds no secret; write one on a line of its own"])
    if len(values) > MAX_VALUES:
        raise ConfigError([f"{path} holds {len(values)} secrets; at most {MAX_VALUES} are good at once"])
    if any(len(value.decode(errors="surrogateescape")) < fewest_chars for value in values):
        raise ConfigError([f"each secret in {path} must have at least {fewest_chars} characters off loopback"])
    warning = f"{path} holds the cluster secret and can be read by other users; chmod 600 it" if mode & 0o044 else ""
    return SecretContent(values, warning)


def _content(path: Path) -> tuple[bytes, int]:
    try:
        raw, mode = read_guarded(path, MAX_FILE_BYTES)
    except ConfigError as error:
        raise ConfigError([f"{path} {error.faults[0]}"]) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError([f"{path} is larger than {MAX_FILE_BYTES >> 10} KiB"])
    return raw, mode


class SecretWatch:
    """Takes over what the file says anew. Looks at its content: a mounted secret changes by a symbolic link, and times lie.

    A content counts once two looks in a row find it, so that a file that is just being written is not taken for a secret. One
    that cannot be used is told once, and the values that were good before stay.
    """

    def __init__(self, path: Path, secret: ClusterSecret, fewest_chars: int = 1) -> None:
        self._path, self._secret, self._fewest_chars = path, secret, fewest_chars
        self._taken: tuple[bytes, ...] | str = secret.accepted
        self._seen: tuple[bytes, ...] | str = self._taken

    def look(self) -> None:
        """Read the file; to be called every second or so, from any one thread."""
        now, before = self._found(), self._seen
        self._seen = now
        if now == self._taken or now != before:
            return
        self._taken = now
        if isinstance(now, str):
            logger.error("the cluster secret stays as it was: %s", now)
            return
        self._secret.replace(*now)
        logger.info("the cluster secret was read anew: %d good now; streams that stand stay", len(now))

    def _found(self) -> tuple[bytes, ...] | str:
        try:
            return read_secret_file(self._path, self._fewest_chars).values
        except ConfigError as error:
            return error.faults[0]
