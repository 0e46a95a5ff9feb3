"""The rules of HELLO: what must be equal, by name, and how two nodes prove that they know the cluster secret."""

import hashlib
import hmac

from pdserve.core.cluster_secret import ClusterSecret, stretched
from pdserve.core.ids import Incarnation
from pdserve.core.layout import KvLayout
from pdserve.kvtransfer.messages import Offer

HELLO_LABEL = b"pdserve kv hello 1"
WELCOME_LABEL = b"pdserve kv welcome 1"
PROOF_USE = b"pdserve kv proof 1"
"""What the secret's key for proofs over KV connections is made for."""


def differences(mine: Offer, theirs: Offer) -> tuple[str, ...]:
    """Return the names of all fields that keep the two from being paired; empty if they fit."""
    faults = mine.identity.differences(theirs.identity)
    faults += mine.capabilities.disagreements(theirs.capabilities)
    faults += _layout_differences(mine.layout, theirs.layout)
    return tuple(faults)


def proof(secret: bytes, label: bytes, challenge: bytes, sender: Incarnation, receiver: Incarnation) -> bytes:
    """Return HMAC-SHA256 over the label, the challenge and both incarnations, 32 bytes, by a key made from one value."""
    return hmac.new(stretched(secret, PROOF_USE), label + challenge + sender + receiver, hashlib.sha256).digest()


def proven_with(
    given: bytes, secret: ClusterSecret, label: bytes, challenge: bytes, sender: Incarnation, receiver: Incarnation
) -> bytes | None:
    """Return the value of `secret` that `given` was made with, compared in constant time; None if it is none of them."""
    for value in secret.accepted:
        if hmac.compare_digest(given, proof(value, label, challenge, sender, receiver)):
            return value
    return None


def _layout_differences(mine: KvLayout, theirs: KvLayout) -> list[str]:
    faults = []
    if mine.dtype != theirs.dtype:
        faults.append("layout.dtype")
    if mine.num_layers != theirs.num_layers:
        return [*faults, "layout.num_layers"]
    pairs = list(zip(mine.layers, theirs.layers, strict=True))
    names = ("num_kv_heads", "key_dim", "value_dim", "window")
    return faults + [f"layout.{name}" for name in names if any(getattr(a, name) != getattr(b, name) for a, b in pairs)]
