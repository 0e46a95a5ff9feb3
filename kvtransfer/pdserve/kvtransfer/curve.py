"""Keys for encrypted KV links, made from the cluster secret, so that an operator has one secret to hand out and no key files.

CurveZMQ makes fresh keys for every connection from the listener's lasting key: who learns the cluster secret later cannot read
what was recorded before. Who may connect is still settled by HELLO's proof; the dialling end's key is fresh and says nothing.
"""

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from pdserve.core.cluster_secret import stretched

_USE = b"pdserve kv curve 1"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair in Z85, the form that libzmq takes."""

    public: bytes
    secret: bytes = field(repr=False)


def listener_keys(cluster_secret: bytes) -> CurveKeys:
    """Return the key pair of every listener of a cluster: the same from the same secret."""
    secret = z85.encode(stretched(cluster_secret, _USE))
    return CurveKeys(zmq.curve_public(secret), secret)


def fresh_keys() -> CurveKeys:
    """Return a new key pair, for one dialling socket."""
    public, secret = zmq.curve_keypair()
    return CurveKeys(public, secret)
