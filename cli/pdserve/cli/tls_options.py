"""How a command speaks TLS to a router: the same four options on every command that calls one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.core.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.client import Tls

TLS = "TLS to the router"


def tls_file(help_text: str, variable: str) -> object:
    """Return the declaration of an option that names a PEM file."""
    return typer.Option(help=help_text, envvar=variable, metavar="FILE", rich_help_panel=TLS, show_default=False)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """What `generate`, `chat` and `status` all take. Any of them makes the command speak TLS."""

    tls: Annotated[
        bool,
        typer.Option("--tls", envvar="PDSERVE_TLS", help="Trust the system's authorities.", rich_help_panel=TLS),
    ] = False
    tls_ca: Annotated[Path | None, tls_file("Authorities to trust instead.", "PDSERVE_TLS_CA")] = None
    tls_cert: Annotated[Path | None, tls_file("Client certificate to show.", "PDSERVE_TLS_CERT")] = None
    tls_key: Annotated[Path | None, tls_file("Its key.", "PDSERVE_TLS_KEY")] = None

    def client_tls(self) -> "Tls | None":
        """Return them as the client takes them; None for a plain connection. Raises InvalidRequest for half a pair."""
        from pdserve.client import Tls

        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("--tls-cert and --tls-key go together", hint="give both, or neither")
        if not (self.tls or self.tls_ca or self.tls_cert):
            return None
        return Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)
