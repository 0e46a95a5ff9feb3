"""Who may open a KV connection at all: proven inside ZeroMQ's own handshake, before a peer gets a message, an id or memory.

A decode node makes an *admission key* every `RENEW_S` and hands it to its routers over Attach, who hand it to the prefill nodes.
A prefill node makes fresh credentials from it for each connection; they travel as user name and password of ZMTP's PLAIN
mechanism (https://rfc.zeromq.org/spec/24), in clear. So they are no secret but a proof: an HMAC of the cluster secret over the
key, both incarnations and a nonce, good once, and only until the key ends.

What HELLO proves afterwards (`handshake`) is more, since it answers a challenge. This stands in front of it, because ZeroMQ
takes what a peer sends into memory, and the id that the peer chose into its tables, before the first message can be looked at.
"""

import hashlib
import hmac
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field

from pdserve.core.clock import Clock
from pdserve.core.cluster_secret import ClusterSecret, stretched
from pdserve.core.ids import ID_BYTES, Incarnation
from pdserve.kvtransfer.handshake import PROOF_USE

KEY_BYTES = 16
RENEW_S = 20.0
GOOD_S = 60.0
"""A prefill node that heard nothing for a while, as when its router was slow, still has a key that is good."""
MAX_USES = 4096
"""Connections per key. Each needs a good proof, so only members can come near it."""
LABEL = b"pdserve kv admission 1"
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a dialling end shows once. `username`: its incarnation and a nonce; `password`: the proof. 32 bytes each."""

    username: bytes
    password: bytes = field(repr=False)


def credentials(key: bytes, secret: ClusterSecret | None, sender: Incarnation, receiver: Incarnation) -> Credentials:
    """Return fresh credentials for one connection from `sender` to `receiver`, who made `key`."""
    username = sender + secrets.token_bytes(_NONCE_BYTES)
    return Credentials(
        username, _proof(b"" if secret is None else stretched(secret.proving, PROOF_USE), key, username, receiver)
    )


@dataclass(slots=True)
class _Key:
    value: bytes
    made_s: float
    used: set[bytes] = field(default_factory=set)


class Admission:
    """The decode node's side: makes keys, and takes each proof once. Thread-safe."""

    def __init__(self, receiver: Incarnation, secret: ClusterSecret | None, clock: Clock) -> None:
        self._receiver, self._secret, self._clock = receiver, secret, clock
        self._lock = threading.Lock()
        self._keys: deque[_Key] = deque()

    def key(self) -> bytes:
        """Return the key to hand out now."""
        with self._lock:
            now_s = self._clock.now_s()
            self._forget_old(now_s)
            if not self._keys or now_s - self._keys[-1].made_s >= RENEW_S:
                self._keys.append(_Key(secrets.token_bytes(KEY_BYTES), now_s))
            return self._keys[-1].value

    def admits(self, username: bytes, password: bytes) -> bool:
        """Whether these credentials are good; they are not, a second time."""
        if len(username) != ID_BYTES + _NONCE_BYTES:
            return False
        values = [b""] if self._secret is None else [stretched(each, PROOF_USE) for each in self._secret.accepted]
        with self._lock:
            self._forget_old(self._clock.now_s())
            for key in self._keys:
                proofs = (_proof(value, key.value, username, self._receiver) for value in values)
                if any(hmac.compare_digest(password, proof) for proof in proofs):
                    is_new = username not in key.used and len(key.used) < MAX_USES
                    if is_new:
                        key.used.add(username)
                    return is_new
        return False

    def _forget_old(self, now_s: float) -> None:
        while self._keys and now_s - self._keys[0].made_s >= GOOD_S:
            self._keys.popleft()


def _proof(of_secret: bytes, key: bytes, username: bytes, receiver: Incarnation) -> bytes:
    # All parts have fixed lengths, so no two inputs run together into the same bytes.
    return hmac.new(key + of_secret, LABEL + username + receiver, hashlib.sha256).digest()
