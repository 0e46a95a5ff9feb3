"""Who may open a KV connection: the proofs alone, without sockets."""

import hmac

import pytest

from pdserve.core.clock import ManualClock
from pdserve.core.cluster_secret import ClusterSecret, stretched
from pdserve.core.ids import Incarnation, new_incarnation
from pdserve.kvtransfer.admission import (
    GOOD_S,
    KEY_BYTES,
    LABEL,
    MAX_USES,
    RENEW_S,
    Admission,
    Credentials,
    credentials,
)
from pdserve.kvtransfer.codec import NONCE_BYTES
from pdserve.kvtransfer.handshake import HELLO_LABEL, PROOF_USE, proof

MINE, THEIRS = new_incarnation(), new_incarnation()
SECRET = ClusterSecret(b"a cluster secret")


def made(secret: ClusterSecret | None = SECRET) -> tuple[Admission, ManualClock]:
    clock = ManualClock()
    return Admission(THEIRS, secret, clock), clock


def shows(admission: Admission, shown: Credentials) -> bool:
    return admission.admits(shown.username, shown.password)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a secret", "without"])
def test_each_proof_is_good_once(secret: ClusterSecret | None) -> None:
    admission, _ = made(secret)
    for _ in range(3):
        shown = credentials(admission.key(), secret, MINE, THEIRS)
        assert [shows(admission, shown) for _ in range(3)] == [True, False, False]


def test_who_lacks_the_secret_or_the_key_is_not_admitted() -> None:
    admission, _ = made()
    key = admission.key()
    for other in (None, ClusterSecret(b"another"), ClusterSecret(key)):
        assert not shows(admission, credentials(key, other, MINE, THEIRS))
    assert not shows(admission, credentials(bytes(KEY_BYTES), SECRET, MINE, THEIRS))
    assert not shows(Admission(THEIRS, SECRET, ManualClock()), credentials(key, SECRET, MINE, THEIRS)), (
        "no key was made"
    )


def test_a_proof_is_for_one_link_and_one_incarnation() -> None:
    admission, _ = made()
    shown = credentials(admission.key(), SECRET, MINE, THEIRS)
    posed = new_incarnation() + shown.username[16:]
    assert not admission.admits(posed, shown.password)
    assert not shows(admission, credentials(admission.key(), SECRET, MINE, new_incarnation()))
    assert shows(admission, shown)


@pytest.mark.parametrize("change", ["flipped", "shorter", "longer", "empty"])
def test_a_changed_proof_is_none(change: str) -> None:
    admission, _ = made()
    shown = credentials(admission.key(), SECRET, MINE, THEIRS)
    password = {
        "flipped": bytes([shown.password[0] ^ 1]) + shown.password[1:],
        "shorter": shown.password[:-1],
        "longer": shown.password + b"\0",
        "empty": b"",
    }[change]
    assert not admission.admits(shown.username, password)
    for username in (b"", shown.username[:-1], shown.username + b"\0"):
        assert not admission.admits(username, shown.password)


def test_a_key_is_renewed_and_the_older_ones_are_good_for_a_while() -> None:
    admission, clock = made()
    first = admission.key()
    clock.advance(RENEW_S - 0.1)
    assert admission.key() == first
    clock.advance(0.1)
    second = admission.key()
    assert second != first
    assert shows(admission, credentials(first, SECRET, MINE, THEIRS))
    clock.advance(GOOD_S - RENEW_S)
    assert not shows(admission, credentials(first, SECRET, MINE, THEIRS))
    assert shows(admission, credentials(second, SECRET, MINE, THEIRS))


def test_what_is_kept_of_used_proofs_is_bounded_and_goes_with_the_key() -> None:
    admission, clock = made()
    key = admission.key()
    assert all(shows(admission, credentials(key, SECRET, MINE, THEIRS)) for _ in range(MAX_USES))
    assert not shows(admission, credentials(key, SECRET, MINE, THEIRS)), "used up"
    clock.advance(RENEW_S)
    assert shows(admission, credentials(admission.key(), SECRET, MINE, THEIRS))
    clock.advance(GOOD_S)
    admission.key()
    assert sum(len(kept.used) for kept in admission._keys) == 0


@pytest.mark.parametrize(("mine", "theirs"), [((b"new", b"old"), (b"old", b"new")), ((b"old",), (b"new", b"old"))])
def test_while_the_secret_is_changed_both_values_are_good(mine: tuple[bytes, ...], theirs: tuple[bytes, ...]) -> None:
    admission, _ = made(ClusterSecret(*theirs))
    assert shows(admission, credentials(admission.key(), ClusterSecret(*mine), MINE, THEIRS))


def test_a_guess_at_the_secret_costs_scrypt() -> None:
    """An impostor at a decode node's address is shown credentials, and a HELLO with a proof over his own challenge."""
    key, challenge = bytes(KEY_BYTES), bytes(NONCE_BYTES)
    shown = credentials(key, SECRET, MINE, THEIRS)
    made = stretched(SECRET.proving, PROOF_USE)
    for guess, is_right in ((SECRET.proving, False), (made, True)):
        password = hmac.digest(key + guess, LABEL + shown.username + THEIRS, "sha256")
        hello = hmac.digest(guess, HELLO_LABEL + challenge + MINE + THEIRS, "sha256")
        assert (password == shown.password) is is_right
        assert (hello == proof(SECRET.proving, HELLO_LABEL, challenge, MINE, THEIRS)) is is_right


def test_credentials_say_nothing_of_the_secret() -> None:
    shown = credentials(b"k" * KEY_BYTES, SECRET, Incarnation(b"m" * 16), THEIRS)
    assert SECRET.proving not in shown.username + shown.password
    assert (len(shown.username), len(shown.password)) == (32, 32)
