"""The secret that all processes of a cluster share: one value, or two while it is being changed."""

import hashlib
from functools import lru_cache

from pdserve.core.errors import ConfigError

MAX_VALUES = 2
_COST = {"n": 1 << 14, "r": 8, "p": 1}


class ClusterSecret:
    """The values that are good now. The first one proves what this process says; each of them is accepted from others.

    To change a secret without a gap: give every process the old and the new one, then the new and the old one, then the new
    one alone. `replace` may be called from any thread; who proves or checks reads the values anew each time.
    """

    __slots__ = ("_values",)

    def __init__(self, *values: bytes) -> None:
        self._values = _checked(values)

    def __repr__(self) -> str:
        return f"ClusterSecret(<{len(self._values)} values>)"

    @property
    def proving(self) -> bytes:
        """The value to prove with."""
        return self._values[0]

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """All values that are good, the proving one first."""
        return self._values

    def replace(self, *values: bytes) -> None:
        """Take other values from now on. Raises ConfigError, and keeps the old ones, if they cannot be used."""
        self._values = _checked(values)


@lru_cache(maxsize=16)
def stretched(value: bytes, use: bytes) -> bytes:
    """Return a key, 32 bytes, made by scrypt from one value of a secret for one use: about 50 ms and 16 MiB, once for each.

    What is proven with it can be shown to strangers: each guess at a short secret costs them as much.
    """
    return hashlib.scrypt(value, salt=use, dklen=32, **_COST)


def _checked(values: tuple[bytes, ...]) -> tuple[bytes, ...]:
    if not values or not all(values):
        raise ConfigError(["the cluster secret is empty"])
    if len(values) > MAX_VALUES:
        raise ConfigError([f"the cluster secret has {len(values)} values; at most {MAX_VALUES} are good at once"])
    return values
