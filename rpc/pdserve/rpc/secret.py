"""The cluster secret on internal calls: sent as metadata, compared in constant time."""

import hmac
import logging
from typing import Any

import grpc

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import Unauthenticated

logger = logging.getLogger(__name__)

HEADER = "x-pdserve-cluster-secret-bin"


def secret_metadata(secret: ClusterSecret | None) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata that proves membership; empty without a secret."""
    return () if secret is None else ((HEADER, secret.proving),)


def check_secret(context: grpc.aio.ServicerContext[Any, Any], secret: ClusterSecret | None) -> None:
    """Raise Unauthenticated unless the call carries `secret`; without a secret (loopback) everyone may call."""
    if secret is None:
        return
    given = dict(context.invocation_metadata() or ()).get(HEADER, b"")
    raw = given if isinstance(given, bytes) else given.encode("latin-1")
    if not any(hmac.compare_digest(raw, value) for value in secret.accepted):
        logger.warning("a call without the cluster secret was refused", extra={"peer": context.peer()})
        raise Unauthenticated(
            "the cluster secret is missing or wrong", hint="set the same PDSERVE_CLUSTER_SECRET on every process"
        )
