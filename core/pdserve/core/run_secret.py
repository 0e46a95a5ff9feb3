"""The secret of a local cluster, where a process that the same user starts by hand finds it: one file for each run.

The file lies in a folder that belongs to the user alone: `$XDG_RUNTIME_DIR/pdserve`, or `pdserve/run` in the user's cache folder.
It is a secret file like any other (`--cluster-secret-file` takes it), with remarks that say whose it is. A file whose run is
over is of no use; it is removed by whoever looks next.
"""

import logging
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import ConfigError

MAX_FILE_BYTES = 64 << 10
NAME = re.compile(r"\.?(\d+)\.secret")
"""Named by the supervisor's process id; with a dot in front while it is written."""
OWN_ONLY = 0o077

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A cluster that runs now: its file, its gRPC addresses, and its secret."""

    path: Path
    addresses: frozenset[str]
    secret: ClusterSecret


@dataclass(frozen=True, slots=True)
class Found:
    """What a process on loopback without a secret of its own goes by. At most one of `run` and `warning` says something."""

    run: LocalRun | None = None
    warning: str = ""


class RunFile:
    """This process's file; written anew when addresses become known. A context manager: it removes the file at the end."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._name = secret, f"{os.getpid()}.secret"
        self.fault = ""
        """Why there is no file; "" while there is one."""

    def __enter__(self) -> "RunFile":
        # Whoever comes clears away what killed runs left.
        find(())
        self.tell(())
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, ConfigError), _opened(runs_folder()) as folder:
            os.unlink(self._name, dir_fd=folder)

    def tell(self, addresses: Collection[str]) -> None:
        """Write the file, whole from one moment to the next."""
        lines = [
            "# The cluster secret of a local pdserve cluster, for this run of it.",
            f"# pid {_identity(os.getpid())}",
        ]
        lines += [f"# address {address}" for address in addresses]
        content = "\n".join([*lines, self._secret.decode(), ""]).encode()
        beside = f".{self._name}"
        try:
            path = runs_folder()
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(0o700)
            with _opened(path) as folder:
                with suppress(FileNotFoundError):
                    os.unlink(beside, dir_fd=folder)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(beside, flags, 0o600, dir_fd=folder)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                os.replace(beside, self._name, src_dir_fd=folder, dst_dir_fd=folder)
            self.fault = ""
        except (OSError, ConfigError) as error:
            why = error.faults[0] if isinstance(error, ConfigError) else str(error)
            self.fault = f"processes started by hand will not find this cluster's secret: {why}"


def runs_folder() -> Path:
    """Return the folder of the files: in XDG_RUNTIME_DIR where that is the user's own, else in the user's cache."""
    stated = os.environ.get("XDG_RUNTIME_DIR", "")
    with suppress(OSError):
        if Path(stated).is_absolute() and _is_own(Path(stated).stat(), 0o022):
            return Path(stated) / "pdserve"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve" / "run"


def find(addresses: Collection[str]) -> Found:
    """Return the one run of this user, or of several the one that has one of `addresses`; what is left of dead ones goes."""
    path = runs_folder()
    try:
        with _opened(path) as folder:
            runs = list(_live_runs(path, folder))
    except FileNotFoundError:
        return Found()
    except (OSError, ConfigError) as error:
        why = error.faults[0] if isinstance(error, ConfigError) else str(error)
        return Found(warning=f"local clusters are not looked for: {why}")
    told = {_normal(address) for address in addresses}
    fitting = runs if len(runs) < 2 else [run for run in runs if run.addresses & told]
    if len(fitting) == 1:
        return Found(run=fitting[0])
    if not runs:
        return Found()
    names = ", ".join(str(run.path) for run in runs)
    return Found(warning=f"several local clusters run; choose one with --cluster-secret-file FILE: {names}")


def local_secret(addresses: Collection[str]) -> ClusterSecret | None:
    """Return the secret of the local cluster that has one of `addresses`, or of the only one; None if that is unclear."""
    found = find(addresses)
    if found.warning:
        logger.warning("%s", found.warning)
    return None if found.run is None else found.run.secret


def secret_at(address: str) -> ClusterSecret | None:
    """Return the secret of the local cluster that has this very address; None if there is none.

    Another name of the same host does not do: somebody else may listen at [::1] where this user listens at 127.0.0.1.
    """
    run = find((address,)).run
    return run.secret if run is not None and address in run.addresses else None


def _live_runs(path: Path, folder: int) -> Iterator[LocalRun]:
    for name in sorted(os.listdir(folder)):
        match = NAME.fullmatch(name)
        if match is None:
            continue
        pid = int(match.group(1))
        try:
            text = _text(name, folder)
        except FileNotFoundError:
            continue
        except (OSError, ConfigError) as error:
            logger.warning("%s is no file of a local cluster: %s", path / name, error)
            continue
        is_whole = not name.startswith(".")
        remarks = [line.removeprefix("# ").partition(" ") for line in text.splitlines() if line.startswith("# ")]
        if not _is_alive(pid) or (is_whole and ("pid", " ", _identity(pid)) not in remarks):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
        elif is_whole:
            values = [line.encode() for line in text.splitlines() if line and not line.startswith("#")]
            addresses = frozenset(_normal(value) for key, _, value in remarks if key == "address")
            yield LocalRun(path / name, addresses, ClusterSecret(*values))


def _text(name: str, folder: int) -> str:
    """Return what a file says, if nobody but this user could have written or read it."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status, OWN_ONLY):
            raise ConfigError(["it must be a file of yours that nobody else can read"])
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the folder, if it is a folder and belongs to this user alone. Raises ConfigError, OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_own(os.fstat(folder), OWN_ONLY):
            raise ConfigError([f"{path} must be a folder of yours that nobody else can enter (chmod 700)"])
        yield folder
    finally:
        os.close(folder)


def _is_own(status: os.stat_result, closed_bits: int) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & closed_bits


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _identity(pid: int) -> str:
    """Return the process id and, on Linux, when that process began: the number alone comes again."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = "unknown"
    return f"{pid} began {began}"


def _normal(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{'127.0.0.1' if host in ('localhost', '[::1]', '::1') else host}:{port}"
