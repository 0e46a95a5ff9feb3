"""Proofs of the cluster secret between processes. The secret itself never travels.

Each side sends a fresh nonce, and proves the secret by an HMAC-SHA256 over a label, both nonces and what the proof is good for.
The label says who proves what, so that a proof is of no use in the other direction or in another place; the nonces are fresh,
so that it is of no use again. The side that is dialled proves first, because the other one has prompts to lose. It proves with
its first value, and the answer is made with the value that it used: so two processes understand each other while a secret is
being changed.

What this does not do: who can change bytes on the way passes both proofs on and reads along. Only TLS keeps them out.
"""

import hashlib
import hmac
import secrets

from pdserve.core.cluster_secret import ClusterSecret, stretched
from pdserve.core.errors import Unauthenticated

NONCE_BYTES = 32
ATTACH_NODE = b"pdserve attach node 1"
ATTACH_ROUTER = b"pdserve attach router 1"
CALL_NODE = b"pdserve call node 1"
CALL_TICKET = b"pdserve call ticket 1"
HINT = "give every process the same secret: --cluster-secret-file FILE, or PDSERVE_CLUSTER_SECRET"

_USE = b"pdserve grpc proof 1"


def fresh_nonce() -> bytes:
    """Return 32 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(value: bytes, label: bytes, *parts: bytes) -> bytes:
    """Return the proof, 32 bytes, that one value of the secret gives for `parts` under `label`."""
    # Every part with its length: no two lists of parts make the same bytes.
    told = b"".join(len(part).to_bytes(4, "big") + part for part in (label, *parts))
    return hmac.new(stretched(value, _USE), told, hashlib.sha256).digest()


def is_proof(given: bytes, value: bytes, label: bytes, *parts: bytes) -> bool:
    """Return whether `given` is that proof, compared in constant time."""
    return hmac.compare_digest(given, proof(value, label, *parts))


def proven_with(given: bytes, secret: ClusterSecret, label: bytes, *parts: bytes) -> bytes | None:
    """Return the value of `secret` that `given` was made with; None if it is none of them."""
    return next((value for value in secret.accepted if is_proof(given, value, label, *parts)), None)


def stream_parts(router_nonce: bytes, node_nonce: bytes, incarnation: bytes, stream_number: int) -> tuple[bytes, ...]:
    """Return what both proofs of an Attach stream are made over, in order."""
    return router_nonce, node_nonce, incarnation, stream_number.to_bytes(8, "big")


def unproven(why: str) -> Unauthenticated:
    """Return the error for a process that did not prove the secret. It tells nothing but what to do."""
    return Unauthenticated(why, hint=HINT)
