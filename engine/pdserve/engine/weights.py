"""The digest of a model's weight files: what a pair of nodes must share before KV may move.

Taken over the source files, before any cast. Reading half a gigabyte takes seconds, so a file's digest is remembered in the
cache folder under its path, size and time of change.
"""

import hashlib
import json
import logging
import os
from pathlib import Path

from pdserve.core.errors import ModelUnavailable
from pdserve.core.models import cache_dir

log = logging.getLogger(__name__)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, sorted by name; raise ModelUnavailable if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelUnavailable(f"{folder} holds no .safetensors weights", hint="convert the model to safetensors")
    return files


def weight_digest(folder: Path) -> str:
    """Return SHA-256 (hex) over names and digests of all weight files; raise ModelUnavailable if one cannot be read."""
    combined = hashlib.sha256()
    for file in weight_files(folder):
        combined.update(f"{file.name} {file_digest(file)}\n".encode())
    return combined.hexdigest()


def file_digest(file: Path) -> str:
    """Return SHA-256 (hex) of a file, remembered while its path, size and time of change stay the same."""
    try:
        status = file.stat()
        key: dict[str, str | int] = {
            "path": str(file.resolve()),
            "bytes": status.st_size,
            "changed_ns": status.st_mtime_ns,
            "inode": status.st_ino,
        }
        note = cache_dir() / "digests" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"
        known = _read_note(note, key)
        if known is None:
            with file.open("rb") as stream:
                known = hashlib.file_digest(stream, "sha256").hexdigest()
            _write_note(note, key | {"sha256": known})
    except OSError as error:
        raise ModelUnavailable(f"cannot read {file}: {error}") from error
    return known


def _read_note(note: Path, key: dict[str, str | int]) -> str | None:
    try:
        content = json.loads(note.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    same = isinstance(content, dict) and all(content.get(name) == value for name, value in key.items())
    return str(content["sha256"]) if same and "sha256" in content else None


def _write_note(note: Path, content: dict[str, str | int]) -> None:
    """Keep the digest. A read-only cache folder costs the seconds again at the next start, nothing else."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(content))
        draft.replace(note)
    except OSError as error:
        log.warning("weight digest not remembered: %s", error)
