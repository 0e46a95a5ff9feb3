"""How a client speaks TLS: whom it trusts, and the certificate that it shows."""

import os
import ssl
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.core.certificates import TlsFiles, TlsMaterial, read_tls, tls_faults
from pdserve.core.errors import ConfigError

FilePath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to a router. The files are PEM, and read when the client is made.

    `ca`: whose signature on the router's certificate is trusted, a file or PEM itself; None: the authorities of this system.
    `cert` and `key`: what to show to a router that asks for a client certificate. `server_name`: the name that the router's
    certificate must bear, where it is not the host of the address, as behind a forwarded port.
    """

    ca: FilePath | bytes | None = None
    cert: FilePath | None = None
    key: FilePath | None = None
    server_name: str = ""

    def material(self) -> TlsMaterial:
        """Return what the files hold. Raises ConfigError with all that is wrong with them."""
        cert, key = (None if given is None else Path(given) for given in (self.cert, self.key))
        if faults := tls_faults(cert, key, ()):
            raise ConfigError(faults)
        ca = None if self.ca is None or isinstance(self.ca, bytes) else Path(self.ca)
        read = read_tls(TlsFiles(cert, key, ca, is_client=True), time.time())
        if ca is not None:
            return read
        return replace(read, authorities=self.ca if isinstance(self.ca, bytes) else system_authorities())


def system_authorities() -> bytes:
    """Return the authorities that this system trusts, PEM; empty where it has none, and gRPC's own list counts.

    gRPC by itself never looks at the system's: an authority that the machine's owner added would not be known.
    """
    paths = ssl.get_default_verify_paths()
    files = [Path(paths.cafile)] if paths.cafile else sorted(Path(paths.capath).glob("*.0")) if paths.capath else []
    found = []
    for path in files:
        try:
            found.append(path.read_bytes())
        except OSError:
            continue  # a dangling link in a folder of hundreds
    return b"\n".join(dict.fromkeys(found))
