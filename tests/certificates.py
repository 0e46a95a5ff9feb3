"""Certificates made while tests run; no key is kept anywhere."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdserve.client import Tls
from pdserve.core.certificates import TlsFiles

DAY = datetime.timedelta(days=1)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate chain and of its key."""

    cert: Path
    key: Path

    def become(self, other: "Pair") -> None:
        """Put another pair's bytes in these files."""
        self.cert.write_bytes(other.cert.read_bytes())
        self.key.write_bytes(other.key.read_bytes())


class Authority:
    """One authority and what it signs, in files of `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self.name = folder, name
        self._authority = trustme.CA(organization_name=name)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._authority.cert_pem.bytes())

    def issue(
        self,
        name: str,
        *identities: str,
        begins: datetime.datetime | None = None,
        ends: datetime.datetime | None = None,
    ) -> Pair:
        """Return a pair for 127.0.0.1, or for the identities given."""
        leaf = self._authority.issue_cert(
            *(identities or ("127.0.0.1",)), common_name=name, not_before=begins, not_after=ends or now() + 90 * DAY
        )
        chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
        return self._written(name, chain, leaf.private_key_pem.bytes())

    def issue_odd(
        self,
        name: str,
        uses: tuple[x509.ObjectIdentifier, ...] = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
        key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | None = None,
    ) -> Pair:
        """Return a pair that `trustme` does not make: of another kind of key, or for other uses."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        signer = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        issuer = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes()).subject
        cert = (
            x509.CertificateBuilder(
                issuer, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key()
            )
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() - DAY)
            .not_valid_after(now() + 90 * DAY)
            .add_extension(x509.ExtendedKeyUsage(list(uses)), critical=False)
            .sign(signer, hashes.SHA256())
        )
        return self._written(name, cert.public_bytes(serialization.Encoding.PEM), pem_of(key))

    def _written(self, name: str, chain: bytes, key: bytes) -> Pair:
        pair = Pair(self.folder / f"{self.name}-{name}.crt", self.folder / f"{self.name}-{name}.key")
        pair.cert.write_bytes(chain)
        pair.key.write_bytes(key)
        pair.key.chmod(0o600)
        return pair


def pem_of(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, passphrase: bytes = b"") -> bytes:
    """Return a key in PEM form."""
    locked = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)


def files_of(pair: Pair, ca: Path | None = None) -> TlsFiles:
    """Return the files of one end."""
    return TlsFiles(pair.cert, pair.key, ca)


def trust(authority: Authority, pair: Pair | None = None) -> Tls:
    """Return a client's TLS that trusts `authority`, and shows `pair`."""
    return Tls(authority.ca, *(() if pair is None else (pair.cert, pair.key)))
