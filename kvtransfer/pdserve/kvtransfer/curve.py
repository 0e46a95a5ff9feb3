"""Keys for encrypted KV links, made from the cluster secret, so that an operator has one secret to hand out and no key files.

CurveZMQ makes fresh keys for every connection from the listener's lasting key: who learns the cluster secret later cannot read
what was recorded before. Who may connect is still settled by HELLO's proof; the dialling end's key is fresh and says nothing.
"""

import hashlib
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

LABEL = b"pdserve kv curve 1"
_KEY_BYTES = 32
_COST = {"n": 1 << 14, "r": 8, "p": 1}
"""About 50 ms and 16 MiB, once at start: a short secret is not guessed cheaply from a recorded greeting."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair in Z85, the form that libzmq takes."""

    public: bytes
    secret: bytes = field(repr=False)


def listener_keys(cluster_secret: bytes) -> CurveKeys:
    """Return the key pair of every listener of a cluster: the same from the same secret."""
    raw = hashlib.scrypt(cluster_secret, salt=LABEL, dklen=_KEY_BYTES, **_COST)
    secret = z85.encode(raw)
    return CurveKeys(zmq.curve_public(secret), secret)


def fresh_keys() -> CurveKeys:
    """Return a new key pair, for one dialling socket."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public, secret)
