"""A process's certificate: read from PEM files, checked before it is used, and told by its names and its dates.

Checked with the standard library alone: the pair is loaded, and one TLS handshake is made with it in memory, which proves key,
purpose and dates at once. Nothing here says whom to trust; that is for the other end to check.
"""

import re
import ssl
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pdserve.core.errors import ConfigError

SOON_S = 14 * 86_400.0
"""Time before a certificate's end from which on it is warned of."""
CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
SERVED_KEYS = (
    bytes.fromhex("06092a864886f70d010101"),  # RSA
    bytes.fromhex("06082a8648ce3d030107"),  # ECDSA, P-256
    bytes.fromhex("06052b81040022"),  # ECDSA, P-384
)
"""Object ids, in DER, of the keys that gRPC's TLS signs with. It has no Ed25519 and no P-521, and would hang up on everybody."""
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which `ssl` has no name for: the dates are compared here, with the caller's clock."""
NUM_TRIES = 3
"""Readings of files that change meanwhile."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection: its own chain and key, and the authorities of whoever is at the other end.

    `is_client`: this end opens the connections, and shows its certificate there. `ca_name` is the setting that `ca` comes from.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    is_client: bool = False
    ca_name: str = "tls_ca"

    @property
    def by_setting(self) -> dict[str, Path]:
        """The files that there are, by the settings that name them."""
        named = {"tls_cert": self.cert, "tls_key": self.key, self.ca_name: self.ca}
        return {name: path for name, path in named.items() if path is not None}


@dataclass(frozen=True, slots=True)
class Certificate:
    """Whom a certificate names (DNS names and IP addresses), and from when until when it is good, seconds since 1970."""

    names: tuple[str, ...]
    begins_s: float
    ends_s: float


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What good files hold, PEM. Empty where there is no such file."""

    chain: bytes = b""
    key: bytes = field(default=b"", repr=False)
    authorities: bytes = b""
    certificate: Certificate | None = None

    def warnings(self, now_s: float) -> list[str]:
        """Return what is doubtful, or will soon be wrong."""
        its = self.certificate
        if its is None:
            return []
        told = []
        if not its.names:
            told.append("the certificate in tls_cert has no subjectAltName: most clients take it for no host")
        if its.ends_s <= now_s:
            told.append(
                f"the certificate in tls_cert expired on {_date(its.ends_s)}: nobody accepts it; renew the file"
            )
        elif its.ends_s - now_s <= SOON_S:
            told.append(f"the certificate in tls_cert expires on {_date(its.ends_s)}, within 14 days: renew the file")
        return told


def read_tls(files: TlsFiles, now_s: float) -> TlsMaterial:
    """Read all files and check them; `now_s` is seconds since 1970. Raises ConfigError with every fault, by setting."""
    for _ in range(NUM_TRIES):
        content = contents(files)
        certificate, faults = _checked(files, content, now_s)
        if contents(files) == content:
            break
    else:
        faults = ["tls_cert: the files change all the time while they are read"]
    if faults:
        raise ConfigError(faults, hint="docs/tls.md shows how to make the files")
    return TlsMaterial(
        content.get("tls_cert") or b"",
        content.get("tls_key") or b"",
        content.get(files.ca_name) or b"",
        certificate,
    )


def tls_faults(cert: Path | None, key: Path | None, ends: Iterable[TlsFiles | None]) -> list[str]:
    """Return what is wrong with a process's TLS settings, and with the files of its `ends`, each fault once."""
    if (cert is None) != (key is None):
        given, missing = ("tls_cert", "tls_key") if key is None else ("tls_key", "tls_cert")
        return [f"{missing}: required with {given}: a certificate and its key go together"]
    faults: dict[str, None] = {}
    for files in ends:
        if files is None:
            continue
        if files.cert is None and not files.is_client:
            need = "needs tls_cert and tls_key: callers show a certificate only to a port with TLS"
            faults[f"{files.ca_name}: {need}"] = None
        try:
            read_tls(files, time.time())
        except ConfigError as error:
            faults |= dict.fromkeys(error.faults)
    return list(faults)


def contents(files: TlsFiles) -> dict[str, bytes | None]:
    """Return the bytes of every file, by setting; None for one that cannot be read."""
    found: dict[str, bytes | None] = {}
    for name, path in files.by_setting.items():
        try:
            found[name] = path.read_bytes()
        except OSError:
            found[name] = None
    return found


def refusal(files: TlsFiles) -> str:
    """Return why a port that asks for certificates of `files.ca` would refuse the pair; "" if it takes it. The files are good."""
    assert files.cert is not None
    assert files.ca is not None
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for end in (server, client):
        end.load_cert_chain(files.cert, files.key, password="")
    server.load_verify_locations(files.ca)
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        _connect(server, client)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    return ""


def is_open_to_all(key: Path | None) -> bool:
    """Whether every user of the machine may read the key file."""
    if key is None:
        return False
    try:
        return bool(key.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def _checked(
    files: TlsFiles, content: Mapping[str, bytes | None], now_s: float
) -> tuple[Certificate | None, list[str]]:
    """Return what the certificate says, and all faults."""
    faults = [
        f"{name}: {fault}"
        for name, path in files.by_setting.items()
        if (fault := _file_fault(path, content[name], is_key=name == "tls_key"))
    ]
    if files.cert is None or files.key is None or any(fault.startswith(("tls_cert", "tls_key")) for fault in faults):
        return None, faults
    try:
        certificate = _own_certificate(files, content["tls_cert"] or b"")
    except ConfigError as error:
        return None, [*faults, *error.faults]
    if now_s >= certificate.ends_s:
        faults.append(f"tls_cert: the certificate in {files.cert} expired on {_date(certificate.ends_s)}; renew it")
    if now_s < certificate.begins_s:
        faults.append(
            f"tls_cert: the certificate in {files.cert} is not valid before {_date(certificate.begins_s)}; "
            "is this machine's clock right?"
        )
    return certificate, faults


def _file_fault(path: Path, content: bytes | None, *, is_key: bool) -> str:
    """Return what is wrong with one file by itself."""
    if content is None:
        try:
            path.read_bytes()
        except OSError as error:
            return f"{path} cannot be read ({(error.strerror or str(error)).lower()})"
        return f"{path} could not be read a moment ago"
    if is_key:
        if not PRIVATE_KEY.search(content):
            return f"{path} holds no private key in PEM form (-----BEGIN PRIVATE KEY-----)"
        is_locked = b"ENCRYPTED" in content
        return f"the key in {path} has a passphrase; take it off: openssl pkey -in OLD -out NEW" if is_locked else ""
    if not CERTIFICATE.search(content):
        return f"{path} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
    try:
        _trusting(b"\n".join(CERTIFICATE.findall(content)))
    except (ssl.SSLError, ValueError):
        return f"{path} holds a certificate that cannot be read: it is damaged"
    return ""


def _own_certificate(files: TlsFiles, chain: bytes) -> Certificate:
    """Make a handshake with the pair and return what its certificate says. Raises ConfigError if it is of no use."""
    assert files.cert is not None
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise ConfigError([f"tls_key: {files.key} is not the key of the certificate in {files.cert}"]) from None
        raise ConfigError([f"tls_key: the pair cannot be used ({(error.reason or str(error)).lower()})"]) from None
    except OSError as error:
        raise ConfigError([f"tls_cert: cannot be read ({(error.strerror or str(error)).lower()})"]) from None
    first = CERTIFICATE.findall(chain)[0]
    if not any(kind in ssl.PEM_cert_to_DER_cert(first.decode("ascii")) for kind in SERVED_KEYS):
        raise ConfigError(["tls_key: gRPC's TLS has RSA, ECDSA P-256 and ECDSA P-384 keys; make one of these"])
    client = _trusting(first)
    if files.is_client:
        client.load_cert_chain(files.cert, files.key, password="")
        server.load_verify_locations(cadata=first.decode("ascii"))
        server.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
        server.verify_mode = ssl.CERT_REQUIRED
    return _shake_hands(server, client)


def _trusting(certificates: bytes) -> ssl.SSLContext:
    """Return a client that trusts these very certificates, whoever signed them, whatever they name, and whenever they end."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    client.load_verify_locations(cadata=certificates.decode("ascii"))
    return client


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> Certificate:
    """Return what the server's certificate says. Raises ConfigError where one of them does not accept the other's."""
    try:
        told = _connect(server, client).getpeercert() or {}
        dates = [float(ssl.cert_time_to_seconds(str(told[name]))) for name in ("notBefore", "notAfter")]
    except ssl.SSLCertVerificationError as error:
        need = "it needs serverAuth, and clientAuth where it is shown to others"
        fault = f"tls_cert: the certificate is not for this use ({error.verify_message}); {need}"
        raise ConfigError([fault]) from None
    except (ssl.SSLError, KeyError) as error:
        raise ConfigError([f"tls_cert: no handshake can be made with the pair ({error})"]) from None
    names = tuple(str(entry[1]) for entry in told.get("subjectAltName", ()))
    return Certificate(names, *dates)


def _connect(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Return the client's end of a connection of the two, made in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):  # TLS 1.3 has two flights; the last turn finds nothing to do
        for end in (asking, answering):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return asking


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
