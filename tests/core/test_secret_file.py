"""The file of the cluster secret: what it may say, who may read it, and what becomes of a change."""

import logging
import os
from pathlib import Path

import pytest

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import ConfigError
from pdserve.core.handed_secret import HandedSecret, read_handed_secret
from pdserve.core.node_settings import NodeSettings, PrefillSettings
from pdserve.core.router_settings import RouterSettings
from pdserve.core.secret_file import MAX_FILE_BYTES, SecretWatch, read_secret_file
from pdserve.core.settings import load_settings

OLD, NEW = "the old secret of the test", "the new secret of the test"


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "secret", OLD)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a", [b"a"]),
        ("a\n", [b"a"]),
        ("\n# old and new\n  a b \r\n\n#c\nd", [b"a b", b"d"]),
        ("a\na\n", [b"a"]),
        (b"\xef\xbb\xbfa", [b"a"]),
        (b"\xff\xfe", [b"\xff\xfe"]),
    ],
)
def test_one_or_two_lines_count(text: str | bytes, values: list[bytes], tmp_path: Path) -> None:
    assert read_secret_file(write(tmp_path / "secret", text)).values == tuple(values)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no secret"),
        ("\n # only a remark\n", "holds no secret"),
        ("a\nb\nc", "holds 3 secrets; at most 2"),
        ("x" * (MAX_FILE_BYTES + 1), "larger than 64 KiB"),
    ],
)
def test_what_is_no_secret_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    path = write(tmp_path / "secret", text)
    with pytest.raises(ConfigError) as error:
        load_settings(PrefillSettings, {"cluster_secret_file": str(path)})
    [fault] = error.value.faults
    assert fault.startswith(f"--cluster-secret-file: {path} ")
    assert named in fault
    assert not any(word in fault for word in text.split() if len(word) > 3 and not word.startswith("re"))


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, named in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "no regular file"),
        (tmp_path / "pipe", "regular"),
    ):
        with pytest.raises(ConfigError) as error:
            load_settings(RouterSettings, {"cluster_secret_file": str(path)})
        [fault] = error.value.faults
        assert fault.startswith(f"--cluster-secret-file: {path} ")
        assert named in fault


def test_a_file_that_others_may_change_is_refused_and_one_that_they_may_read_is_warned_of(file: Path) -> None:
    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="changed by other users; chmod 600"):
            load_settings(RouterSettings, {"cluster_secret_file": str(file)})
    for mode, number in ((0o640, 1), (0o644, 1), (0o600, 0), (0o400, 0)):
        file.chmod(mode)
        settings = load_settings(RouterSettings, {"cluster_secret_file": str(file)})
        assert len(settings.warnings) == number
        assert settings.secret is not None
        assert settings.secret.accepted == (OLD.encode(),)


def test_both_sources_are_one_too_many(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", "something")
    with pytest.raises(ConfigError) as error:
        load_settings(RouterSettings, {"cluster_secret_file": str(file)})
    assert error.value.faults == ["--cluster-secret-file: the secret is given twice; leave out this or cluster_secret"]


def test_off_loopback_each_value_is_long_enough(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", f"{OLD}\n{'x' * 15}\n")
    given = {"cluster_secret_file": str(path), "host": "10.0.0.5"}
    with pytest.raises(ConfigError, match="at least 16 characters"):
        load_settings(RouterSettings, given)
    assert load_settings(RouterSettings, {"cluster_secret_file": str(path)}).secret is not None
    write(path, f"{OLD}\n{'x' * 16}\n")
    settings = load_settings(RouterSettings, given)
    assert settings.secret is not None
    assert settings.secret.accepted == (OLD.encode(), b"x" * 16)
    assert OLD not in repr(settings)


def test_kv_encryption_takes_its_keys_from_the_file_too(file: Path) -> None:
    assert load_settings(PrefillSettings, {"cluster_secret_file": str(file), "kv_encryption": "curve"}).secret


def test_a_handed_secret_counts_where_no_other_is_set(file: Path) -> None:
    with HandedSecret() as handed:
        given = {"cluster_secret_fd": str(handed.fd)}
        for _ in range(2):
            settings = load_settings(NodeSettings, given)
            assert settings.secret is not None
            assert settings.secret.accepted == (handed.value,)
        settings = load_settings(NodeSettings, given | {"cluster_secret_file": str(file)})
        assert settings.secret is not None
        assert settings.secret.accepted == (OLD.encode(),)
        assert len(handed.value) == 64
        assert read_handed_secret(handed.fd).proving == handed.value
        assert not os.get_inheritable(handed.fd)
    with pytest.raises(ConfigError, match="--cluster-secret-fd: cannot be read"):
        load_settings(NodeSettings, given)


# ---- changes while a process runs


@pytest.fixture
def watch(file: Path) -> tuple[SecretWatch, ClusterSecret]:
    settings = load_settings(RouterSettings, {"cluster_secret_file": str(file)})
    watch = settings.secret_watch()
    assert watch is not None
    assert settings.secret is not None
    return watch, settings.secret


def test_a_change_is_taken_at_the_second_look(watch: tuple[SecretWatch, ClusterSecret], file: Path) -> None:
    look, secret = watch[0].look, watch[1]
    look()
    write(file, f"{OLD}\n{NEW}")
    look()
    assert list(secret.accepted) == [OLD.encode()]
    look()
    assert list(secret.accepted) == [OLD.encode(), NEW.encode()]
    write(file, f"{NEW}\n{OLD}")
    look()
    look()
    assert (secret.proving, len(secret.accepted)) == (NEW.encode(), 2)


def test_a_half_written_file_is_not_taken(watch: tuple[SecretWatch, ClusterSecret], file: Path) -> None:
    look, secret = watch[0].look, watch[1]
    for text in (NEW[:3], "", NEW[:9], NEW):
        write(file, text)
        look()
        assert secret.accepted == (OLD.encode(),)
    look()
    assert secret.accepted == (NEW.encode(),)


def test_times_and_sizes_that_stay_hide_no_change(watch: tuple[SecretWatch, ClusterSecret], file: Path) -> None:
    """Failure class 41."""
    look, secret = watch[0].look, watch[1]
    before = file.stat()
    write(file, NEW)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)
    look()
    look()
    assert secret.accepted == (NEW.encode(),)


def test_a_mounted_secret_changes_by_its_link(tmp_path: Path) -> None:
    """As the kubelet does it: `..data` points to another folder from one moment to the next."""
    for name, text in (("1", OLD), ("2", NEW)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "secret", text, 0o644)
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "secret").symlink_to("..data/secret")
    settings = load_settings(RouterSettings, {"cluster_secret_file": str(tmp_path / "secret")})
    watch = settings.secret_watch()
    assert watch is not None
    assert settings.secret is not None
    (tmp_path / "..new").symlink_to("2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    watch.look()
    watch.look()
    assert settings.secret.accepted == (NEW.encode(),)


def test_a_bad_content_is_told_once_and_the_old_values_stay(
    watch: tuple[SecretWatch, ClusterSecret], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    look, secret = watch[0].look, watch[1]
    write(file, "a\nb\nc\n")
    for _ in range(5):
        look()
    file.unlink()
    for _ in range(5):
        look()
    assert secret.accepted == (OLD.encode(),)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "holds 3 secrets" in caplog.messages[0]
    assert "cannot be read" in caplog.messages[1]
    write(file, NEW)
    look()
    look()
    assert secret.accepted == (NEW.encode(),)
    assert caplog.records[-1].levelname == "INFO"
    assert not any(value in caplog.text for value in (OLD, NEW))


def test_off_loopback_a_short_change_is_not_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", OLD)
    settings = load_settings(RouterSettings, {"cluster_secret_file": str(path), "host": "10.0.0.5"})
    watch = settings.secret_watch()
    assert watch is not None
    write(path, "short")
    watch.look()
    watch.look()
    assert settings.secret is not None
    assert settings.secret.accepted == (OLD.encode(),)
