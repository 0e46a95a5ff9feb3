"""Settings of TLS: which belong together, and what is wrong with a file, told before anything starts."""

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID

from pdserve.core.certificates import TlsFiles, is_open_to_all, read_tls
from pdserve.core.errors import ConfigError
from pdserve.core.node_settings import PrefillSettings
from pdserve.core.process_settings import ProcessSettings
from pdserve.core.router_settings import RouterSettings
from pdserve.core.settings import load_settings
from tests.certificates import DAY, Authority, Pair, files_of, now, pem_of

NAMES = ("TLS_CERT", "TLS_KEY", "TLS_CA", "TLS_CLIENT_CA")
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"PDSERVE_{name}", raising=False)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def faults_of(kind: type[ProcessSettings], **given: Path | str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_settings(kind, {name: str(value) for name, value in given.items()})
    return error.value.faults


def faults_of_pair(pair: Pair) -> list[str]:
    return faults_of(PrefillSettings, tls_cert=pair.cert, tls_key=pair.key)


def test_good_files_make_the_ends_that_a_process_has(authority: Authority) -> None:
    pair = authority.issue("router", "127.0.0.1", "models.example.org")
    given = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    alone = load_settings(RouterSettings, given)
    assert alone.tls_listening is not None
    assert (alone.tls_listening.ca, alone.tls_dialling) == (None, None)
    both = load_settings(RouterSettings, given | {"tls_ca": str(authority.ca), "tls_client_ca": str(authority.ca)})
    assert both.tls_listening == TlsFiles(pair.cert, pair.key, authority.ca, ca_name="tls_client_ca")
    assert both.tls_dialling == TlsFiles(pair.cert, pair.key, authority.ca, is_client=True)
    node = load_settings(PrefillSettings, given | {"tls_ca": str(authority.ca)})
    assert (node.tls_listening, node.tls_dialling) == (files_of(pair, authority.ca), None)
    assert load_settings(PrefillSettings, {}).tls_listening is None
    certificate = read_tls(files_of(pair), now().timestamp()).certificate
    assert certificate is not None
    assert set(certificate.names) == {"127.0.0.1", "models.example.org"}


def test_a_router_may_dial_nodes_by_tls_without_a_certificate_of_its_own(authority: Authority) -> None:
    settings = load_settings(RouterSettings, {"tls_ca": str(authority.ca)})
    assert (settings.tls_listening, settings.tls_dialling) == (None, TlsFiles(ca=authority.ca, is_client=True))


def test_what_belongs_together_is_asked_for(authority: Authority) -> None:
    pair = authority.issue("x")
    assert faults_of(PrefillSettings, tls_cert=pair.cert) == [
        "tls_key: required with tls_cert: a certificate and its key go together"
    ]
    assert faults_of(RouterSettings, tls_key=pair.key)[0].startswith("tls_cert: required with tls_key")
    (lone,) = faults_of(PrefillSettings, tls_ca=authority.ca)
    assert lone.startswith("--tls-ca: needs tls_cert and tls_key")
    (lone,) = faults_of(RouterSettings, tls_client_ca=authority.ca)
    assert lone.startswith("--tls-client-ca: needs tls_cert and tls_key")


def test_files_of_no_use_are_all_named_at_once(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("x")
    text = tmp_path / "text"
    text.write_text("no PEM")
    given = {"tls_cert": tmp_path / "none", "tls_key": pair.cert, "tls_ca": text, "tls_client_ca": tmp_path}
    told = "\n".join(faults_of(RouterSettings, **given, drain_s="0"))
    assert "--drain-s: must be" in told
    assert f"--tls-cert: {tmp_path / 'none'} cannot be read (no such file or directory)" in told
    assert f"--tls-key: {pair.cert} holds no private key in PEM form" in told
    assert f"--tls-ca: {text} holds no certificate in PEM form" in told
    assert f"--tls-client-ca: {tmp_path} cannot be read (is a directory)" in told


def damaged(authority: Authority) -> Pair:
    pair = authority.issue("damaged")
    lines = pair.cert.read_text().splitlines()
    pair.cert.write_text("\n".join([lines[0], lines[1][::-1], *lines[2:]]))
    return pair


def locked(authority: Authority) -> Pair:
    pair = authority.issue("locked")
    pair.key.write_bytes(pem_of(ec.generate_private_key(ec.SECP256R1()), b"sesame"))
    return pair


def swapped(authority: Authority) -> Pair:
    return Pair(authority.issue("one").cert, authority.issue("two").key)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (damaged, "--tls-cert: {cert} holds a certificate that cannot be read"),
        (locked, "--tls-key: the key in {key} has a passphrase"),
        (swapped, "--tls-key: {key} is not the key of the certificate in {cert}"),
        (
            lambda its: its.issue("old", begins=now() - 9 * DAY, ends=now() - DAY),
            "--tls-cert: the certificate in {cert} expired on",
        ),
        (lambda its: its.issue("new", begins=now() + DAY), "--tls-cert: the certificate in {cert} is not valid before"),
        (
            lambda its: its.issue_odd("ed", key=ed25519.Ed25519PrivateKey.generate()),
            "--tls-key: gRPC's TLS has RSA, ECDSA P-256",
        ),
        (
            lambda its: its.issue_odd("p521", key=ec.generate_private_key(ec.SECP521R1())),
            "--tls-key: gRPC's TLS has RSA",
        ),
        (lambda its: its.issue_odd("use", uses=(CLIENT,)), "--tls-cert: the certificate is not for this use"),
    ],
    ids=["damaged", "locked", "swapped", "expired", "not yet", "ed25519", "p521", "not for servers"],
)
def test_a_pair_of_no_use_is_told_by_name(authority: Authority, make: Callable[[Authority], Pair], words: str) -> None:
    pair = make(authority)
    (fault,) = faults_of_pair(pair)
    assert fault.startswith(words.format(cert=pair.cert, key=pair.key))


def test_a_router_shows_its_certificate_to_nodes_so_it_must_be_for_clients_too(authority: Authority) -> None:
    pair = authority.issue_odd("half", uses=(SERVER,))
    given = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    load_settings(RouterSettings, given)
    (fault,) = faults_of(RouterSettings, **given, tls_ca=authority.ca)
    assert fault.startswith("--tls-cert: the certificate is not for this use")
    assert "clientAuth" in fault


def test_the_end_of_a_certificate_is_warned_of_fourteen_days_before(authority: Authority) -> None:
    ends = now() + 90 * DAY
    material = read_tls(files_of(authority.issue("x", ends=ends)), now().timestamp())

    def warnings(before: datetime.timedelta) -> list[str]:
        return material.warnings((ends - before).timestamp())

    assert warnings(15 * DAY) == []
    assert "expires on" in warnings(13 * DAY)[0]
    assert "expired on" in warnings(-DAY)[0]


def test_a_certificate_that_names_nobody_is_warned_of(authority: Authority) -> None:
    """gRPC takes the common name then, HTTP clients do not."""
    (warning,) = read_tls(files_of(authority.issue_odd("localhost")), now().timestamp()).warnings(now().timestamp())
    assert "no subjectAltName" in warning


def test_a_key_that_every_user_can_read_is_seen(authority: Authority) -> None:
    key = authority.issue("x").key
    assert not is_open_to_all(key)
    key.chmod(0o640)
    assert not is_open_to_all(key), "a pod's secret is read through its group"
    key.chmod(0o644)
    assert is_open_to_all(key)
    assert not is_open_to_all(None)


def test_no_key_is_shown(authority: Authority) -> None:
    pair = authority.issue("x")
    assert "PRIVATE" not in repr(read_tls(files_of(pair), now().timestamp()))
