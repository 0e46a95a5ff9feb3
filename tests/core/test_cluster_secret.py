import hashlib

import pytest

from pdserve.core.cluster_secret import ClusterSecret, stretched
from pdserve.core.errors import ConfigError


def test_the_first_value_proves_and_each_is_accepted() -> None:
    secret = ClusterSecret(b"new", b"old")
    assert (secret.proving, secret.accepted) == (b"new", (b"new", b"old"))
    secret.replace(b"new")
    assert secret.accepted == (b"new",)


@pytest.mark.parametrize("values", [(), (b"",), (b"a", b""), (b"a", b"b", b"c")])
def test_what_cannot_be_a_secret_is_refused_and_the_old_one_stays(values: tuple[bytes, ...]) -> None:
    with pytest.raises(ConfigError):
        ClusterSecret(*values)
    secret = ClusterSecret(b"old")
    with pytest.raises(ConfigError):
        secret.replace(*values)
    assert secret.accepted == (b"old",)


def test_it_is_never_shown() -> None:
    assert "hidden" not in repr(ClusterSecret(b"hidden"))


def test_a_key_is_made_for_one_use_by_scrypt() -> None:
    """Proofs are shown to strangers: what makes a guess at a short secret dear may not go by accident."""
    key = stretched(b"sesame", b"a use")
    assert key == hashlib.scrypt(b"sesame", salt=b"a use", n=1 << 14, r=8, p=1, dklen=32)
    assert len({key, stretched(b"sesame", b"another"), stretched(b"other", b"a use")}) == 3
