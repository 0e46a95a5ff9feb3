"""TLS within a local cluster: how the supervisor, which is a client too, calls its own router, and what would keep it from it."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.core.certificates import TlsFiles, read_tls, refusal
from pdserve.core.process_settings import ProcessSettings
from pdserve.core.router_settings import RouterSettings

if TYPE_CHECKING:
    from pdserve.client import Tls


def tls_faults(settings: Mapping[str, ProcessSettings], host: str) -> list[str]:
    """Return what would keep processes that listen on `host` from each other, seen before any is started."""
    router = settings["router"]
    assert isinstance(router, RouterSettings)
    faults = []
    for name, ca in (("tls_ca", router.tls_ca), ("tls_client_ca", router.tls_client_ca)):
        why = refusal(TlsFiles(router.tls_cert, router.tls_key, ca)) if ca and router.tls_cert else ""
        if why:
            who = "the router calls its nodes" if name == "tls_ca" else "`pdserve up` calls its router"
            faults.append(f"{name}: {ca} does not vouch for {router.tls_cert}, with which {who} ({why})")
    nodes = {its.tls_cert for role, its in settings.items() if role != "router"}
    for cert in sorted(path for path in nodes if path and router.tls_ca):
        its = next(its for its in settings.values() if its.tls_cert == cert)
        names = names_of(TlsFiles(its.tls_cert, its.tls_key))
        if host not in names:
            named = ", ".join(names) or "nothing"
            faults.append(
                f"tls_cert: {cert} must name {host}, by which a local cluster calls its nodes; it names {named}"
            )
    return faults


def client_files(router: RouterSettings) -> TlsFiles | None:
    """Return the files of a client on this machine: what the router itself has. None: it speaks plainly."""
    if router.tls_cert is None:
        return None
    name = "tls_client_ca" if router.tls_client_ca else "tls_ca"
    return TlsFiles(router.tls_cert, router.tls_key, router.tls_ca, ca_name=name)


def names_of(files: TlsFiles) -> tuple[str, ...]:
    """Return the names of a good pair's certificate."""
    certificate = read_tls(replace(files, ca=None), time.time()).certificate
    return certificate.names if certificate else ()


def own_tls(files: TlsFiles | None, host: str) -> "Tls | None":
    """Return how to call the router that listens on `host` with `files`: its own pair is shown to it, and `files.ca` trusted.

    Without an authority those of the system and of the chain file itself count. The certificate need not name `host`: its own
    names are known here.
    """
    from pdserve.client import Tls
    from pdserve.client.tls import system_authorities

    if files is None or files.cert is None:
        return None
    names = names_of(files)
    name = "" if host in names or not names else names[0].replace("*", "any")
    ca = files.ca or files.cert.read_bytes() + b"\n" + system_authorities()
    return Tls(ca=ca, cert=files.cert, key=files.key, server_name=name)


def options_of(files: TlsFiles | None) -> str:
    """Return the options with which a command calls the router; "" for a plain one."""
    if files is None or files.cert is None:
        return ""
    shown = f" --tls-cert {files.cert} --tls-key {files.key}" if files.ca_name == "tls_client_ca" else ""
    return f"--tls-ca {files.ca or files.cert}{shown}"
