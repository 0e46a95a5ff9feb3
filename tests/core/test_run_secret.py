"""The secret of a local cluster: who finds it, and that nobody else can have put it there."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.core.run_secret import RunFile, find, local_secret, runs_folder
from pdserve.core.secret_file import read_secret_file

SECRET = b"a secret of the test"
ROUTER, NODE = "127.0.0.1:50051", "127.0.0.1:40001"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's user; not made yet."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return runtime / "pdserve"


def another_run(folder: Path, *addresses: str, secret: bytes = b"of another run") -> "subprocess.Popen[str]":
    """Start a process that has a file of its own, and return once it is written. It ends when its input does."""
    code = (
        "import sys; from pdserve.core.run_secret import RunFile\n"
        f"file = RunFile({secret!r}); file.tell({addresses!r}); print(file.fault or 'there', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_nothing_is_found_and_nothing_made_where_nothing_runs(folder: Path) -> None:
    assert find([ROUTER]).run is None
    assert find([ROUTER]).warning == ""
    assert local_secret([]) is None
    assert not folder.exists()


def test_the_only_run_is_found_by_anyone_of_this_user_and_goes_with_its_end(folder: Path) -> None:
    with RunFile(SECRET) as file:
        assert file.fault == ""
        assert find([]).run is not None
        file.tell([ROUTER, NODE])
        found = find(["10.0.0.1:1"]).run
        assert found is not None
        assert found.addresses == {ROUTER, NODE}
        assert found.secret.accepted == (SECRET,)
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, found.path)] == [0o700, 0o600]
        assert [path.name for path in folder.iterdir()] == [f"{os.getpid()}.secret"]
        content = read_secret_file(found.path)
        assert (content.values, content.warning) == ((SECRET,), "")
    assert not list(folder.iterdir())
    assert find([]).run is None


@pytest.mark.parametrize("address", [ROUTER, NODE, "localhost:50051"])
def test_of_several_runs_an_address_tells_which(folder: Path, address: str) -> None:
    other = another_run(folder, "127.0.0.1:50052")
    try:
        with RunFile(SECRET) as file:
            file.tell([ROUTER, NODE])
            found = find(["127.0.0.1:1", address])
            assert found.run is not None
            assert found.run.secret.proving == SECRET
            for addresses in ([], ["127.0.0.1:1"], [ROUTER, "127.0.0.1:50052"]):
                found = find(addresses)
                assert found.run is None
                assert "--cluster-secret-file" in found.warning
                assert all(str(folder / f"{pid}.secret") in found.warning for pid in (os.getpid(), other.pid))
    finally:
        end(other)


@pytest.mark.parametrize("clears", ["the next run", "who looks"])
def test_what_a_killed_run_left_is_ignored_and_cleaned(folder: Path, clears: str) -> None:
    other = another_run(folder, ROUTER)
    (folder / f".{other.pid}.secret").touch(0o600)
    assert find([]).run is not None
    end(other)
    assert (folder / f"{other.pid}.secret").exists()
    if clears == "the next run":
        with RunFile(SECRET):
            assert [path.name for path in folder.iterdir()] == [f"{os.getpid()}.secret"]
            found = find([]).run
            assert found is not None
            assert found.secret.proving == SECRET
    else:
        assert find([ROUTER]).run is None
        assert find([ROUTER]).warning == ""
    assert not list(folder.iterdir())


def test_a_process_that_got_a_dead_ones_number_is_not_taken_for_it(folder: Path) -> None:
    other = another_run(folder, ROUTER)
    try:
        path = folder / f"{other.pid}.secret"
        began = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        path.write_text(path.read_text().replace(f"began {began}", "began 1"))
        assert find([]).run is None
        assert not path.exists()
    finally:
        end(other)


@pytest.mark.parametrize("fault", ["open", "foreign", "link", "file"])
def test_a_folder_that_is_not_the_users_alone_is_not_used(folder: Path, fault: str, tmp_path: Path) -> None:
    """Somebody else could have put a secret there that he knows."""
    folder.mkdir(0o700)
    with RunFile(SECRET):
        pass
    if fault == "open":
        folder.chmod(0o750)
    elif fault == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, -1)
    else:
        folder.rmdir()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(0o700)
        folder.symlink_to(elsewhere) if fault == "link" else folder.touch()
    with RunFile(SECRET) as file:
        assert "will not find this cluster's secret" in file.fault
        found = find([])
        assert found.run is None
        assert str(folder) in found.warning
    assert not list((tmp_path / "elsewhere").glob("*"))


@pytest.mark.parametrize("fault", ["readable", "foreign", "link", "pipe"])
def test_a_file_that_is_not_the_users_alone_is_not_used(folder: Path, fault: str, tmp_path: Path) -> None:
    other = another_run(folder, ROUTER)
    try:
        path = folder / f"{other.pid}.secret"
        if fault == "readable":
            path.chmod(0o640)
        elif fault == "foreign":
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            os.chown(path, 12345, -1)
        else:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere") if fault == "link" else os.mkfifo(path, 0o600)
        assert find([]).run is None
    finally:
        end(other)


def test_a_link_that_waits_where_the_file_goes_is_not_followed(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    folder.mkdir(0o700)
    for name in (f".{os.getpid()}.secret", f"{os.getpid()}.secret"):
        (folder / name).symlink_to(target)
    with RunFile(SECRET) as file:
        assert file.fault == ""
        assert not (folder / f"{os.getpid()}.secret").is_symlink()
    assert target.read_text() == "mine"


def test_a_runtime_folder_of_another_user_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under sudo the variable may still be the caller's."""
    assert runs_folder() == folder
    folder.parent.chmod(0o777)
    cache = Path(os.environ["XDG_CACHE_HOME"]) / "pdserve" / "run"
    assert runs_folder() == cache
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runs_folder() == cache
    with RunFile(SECRET) as file:
        assert file.fault == ""
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert find([]).run is not None
