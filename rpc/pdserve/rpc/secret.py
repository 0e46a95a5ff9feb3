"""The cluster secret on internal calls: sent as metadata, compared in constant time."""

import hmac
import logging
from typing import Any

import grpc

from pdserve.core.errors import Unauthenticated

logger = logging.getLogger(__name__)

HEADER = "x-pdserve-cluster-secret-bin"


def secret_metadata(secret: bytes | None) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata that proves membership; empty without a secret."""
    return () if secret is None else ((HEADER, secret),)


def check_secret(context: grpc.aio.ServicerContext[Any, Any], secret: bytes | None) -> None:
    """Raise Unauthenticated unless the call carries `secret`; without a secret (loopback) everyone may call."""
    if secret is None:
        return
    given = dict(context.invocation_metadata() or ()).get(HEADER, b"")
    raw = given if isinstance(given, bytes) else given.encode("latin-1")
    if not hmac.compare_digest(raw, secret):
        logger.warning("a call without the cluster secret was refused", extra={"peer": context.peer()})
        raise Unauthenticated(
            "the cluster secret is missing or wrong", hint="set the same PDSERVE_CLUSTER_SECRET on every process"
        )
