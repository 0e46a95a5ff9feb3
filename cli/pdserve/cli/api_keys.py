"""Which API key a command sends.

PDSERVE_API_KEY means the same at both ends: the router takes every key in it, a command sends the first. `pdserve status`
without a key makes an operator's from the cluster secret, which itself is never sent.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.core.api_keys import best_key_in, operator_key, read_keys_file
from pdserve.core.run_secret import secret_at
from pdserve.core.secret_file import read_secret_file

if TYPE_CHECKING:
    from pdserve.core.router_settings import RouterSettings

ApiKeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="PDSERVE_API_KEY",
        metavar="KEY",
        help="Key to send to the router; of several with commas between, the first.",
        show_default=False,
    ),
]


def key_to_send(given: str) -> str | None:
    """Return the key that an option or the variable gave."""
    return next((key for part in given.split(",") if (key := part.strip())), None)


def operators_key(given: str, server: str) -> str | None:
    """Return the key that was given, or the one that the cluster secret stands for.

    The secret is that of the environment, or of the local cluster of this user whose router is at `server`.
    """
    key = key_to_send(given)
    if key is not None:
        return key
    secret = os.environb.get(b"PDSERVE_CLUSTER_SECRET", b"")
    path = os.environ.get("PDSERVE_CLUSTER_SECRET_FILE", "")
    if secret:
        return operator_key(secret)
    if path:
        return operator_key(read_secret_file(Path(path)).values[0])
    local = secret_at(server)
    return None if local is None else operator_key(local.proving)


def own_key(settings: "RouterSettings") -> str | None:
    """Return a key with which a supervisor asks the router that it starts with these settings."""
    if settings.api_key:
        return settings.api_key[0].get_secret_value()
    if settings.secret is not None:
        return operator_key(settings.secret.proving)
    return None if settings.api_keys_file is None else best_key_in(read_keys_file(settings.api_keys_file))
