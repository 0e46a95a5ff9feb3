"""API keys: who a caller is, and what it may do. Values and pure functions; whether a call is let in is `router.access`'s to say.

A file of keys has a line `OWNER SCOPE KEY` for each; blank lines, and those that begin with #, say nothing. An owner may have
several keys, so that a new one is good before the old one goes. Keys are kept as SHA-256 digests and looked up by them: how long
that takes says nothing of any key.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NewType

from pdserve.core.errors import ConfigError
from pdserve.core.guarded_file import read_guarded

Owner = NewType("Owner", str)
"""Who a key belongs to: a short name that stands in logs. Never a secret."""

NOBODY = Owner("")
"""The owner of a call that named no key, where none is asked for."""
OPTION_OWNER = Owner("api-key")
"""The owner of the keys that a setting holds."""
CLUSTER_OWNER = Owner("cluster-secret")
"""The owner of the key that is made from the cluster secret."""
RESERVED_OWNERS = frozenset({OPTION_OWNER, CLUSTER_OWNER})

SHORTEST_KEY = 16
"""Characters of a key that strangers could try to guess."""
LONGEST_KEY = 1024
MAX_FILE_BYTES = 1 << 20
MAX_FAULTS = 20
"""Faults of a file that are told; a wrong file would have one for every line."""
OWNER_FORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Scope(StrEnum):
    """What a key allows."""

    USE = "use"
    """To have tokens made."""
    OPERATE = "operate"
    """That, and to look at the cluster: its nodes, its load, other people's sessions."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and what it may do."""

    owner: Owner
    scope: Scope

    @property
    def is_operator(self) -> bool:
        """Whether addresses of nodes, and what others ask, may be shown."""
        return self.scope is Scope.OPERATE


OPTION_CALLER = Caller(OPTION_OWNER, Scope.OPERATE)
CLUSTER_CALLER = Caller(CLUSTER_OWNER, Scope.OPERATE)
ANYONE = Caller(NOBODY, Scope.USE)
"""Whoever calls without a key that is known, where others can reach the port."""
ON_LOOPBACK = Caller(NOBODY, Scope.OPERATE)
"""Whoever calls where no keys are configured, and only this host can reach the port."""


class ApiKeys:
    """Keys that are good, each with its caller. Immutable; holds digests only."""

    __slots__ = ("_callers",)

    def __init__(self, callers: Mapping[bytes, Caller] | None = None) -> None:
        self._callers = dict(callers or {})

    @classmethod
    def of(cls, keys: Iterable[str], caller: Caller) -> "ApiKeys":
        """Return keys that all belong to one caller."""
        return cls({digest_of(key): caller for key in keys})

    def __len__(self) -> int:
        return len(self._callers)

    def __repr__(self) -> str:
        return f"ApiKeys(<{len(self)} keys>)"

    def __or__(self, other: "ApiKeys") -> "ApiKeys":
        return ApiKeys(self._callers | other._callers)

    def find(self, key: str) -> Caller | None:
        """Return whose key this is, or None if it is nobody's."""
        return self._callers.get(digest_of(key))

    @property
    def owners(self) -> tuple[Owner, ...]:
        """All owners, in order and once each."""
        return tuple(sorted({caller.owner for caller in self._callers.values()}))


def parse_keys(raw: bytes, *, shortest: int, taken: ApiKeys | None = None) -> ApiKeys:
    """Return the keys of a file of keys. `taken`: those that are given elsewhere, which it may not repeat.

    Raises ConfigError with the faults by line number; no word of it is from the file but owners.
    """
    found: dict[bytes, Caller] = {}
    first: dict[bytes, int] = {}
    faults: list[str] = []
    for number, line in enumerate(_lines_of(raw), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        fault = _fault_of(words, shortest)
        if not fault:
            digest = digest_of(words[2])
            if digest in first:
                fault = f"the key of line {first[digest]} again"
            elif taken is not None and taken.find(words[2]) is not None:
                fault = "this key is given as api_key too"
            else:
                first[digest] = number
                found[digest] = Caller(Owner(words[0]), Scope(words[1]))
        if fault:
            faults.append(f"line {number}: {fault}")
    if len(faults) > MAX_FAULTS:
        faults[MAX_FAULTS:] = [f"and {len(faults) - MAX_FAULTS} more"]
    if not found and not faults:
        faults = ["holds no key; a line is OWNER SCOPE KEY"]
    if faults:
        raise ConfigError(faults)
    return ApiKeys(found)


def read_keys_file(path: Path) -> bytes:
    """Return the bytes of a file of keys, or as many as show that it is too long.

    Raises ConfigError if it cannot be read, or if other users can change it: one of them could make himself an operator.
    """
    return read_guarded(path, MAX_FILE_BYTES)[0]


def best_key_in(raw: bytes) -> str | None:
    """Return a key of a file that was found good: an operator's, if it has one."""
    lines = [line.split() for line in _lines_of(raw)]
    keys = {scope: key for owner, scope, key in (words for words in lines if len(words) == 3) if owner[0] != "#"}
    return keys.get(Scope.OPERATE, keys.get(Scope.USE))


def key_fault(key: str) -> str:
    """Return why a key cannot be sent in a header, or "". The words are not the key's."""
    if not key.isascii() or not key.isprintable() or " " in key:
        return "must be printable ASCII without spaces: it travels in a header"
    return f"must have at most {LONGEST_KEY} characters" if len(key) > LONGEST_KEY else ""


def bearer_key(authorizations: Sequence[str | bytes]) -> str | None:
    """Return the key in the values of a call's `authorization` headers; None if there is not exactly one, or no key in it."""
    if len(authorizations) != 1 or not isinstance(authorizations[0], str):
        return None
    scheme, _, rest = authorizations[0].strip(" ").partition(" ")
    key = rest.strip(" ")
    return key if scheme.lower() == "bearer" and key and not key_fault(key) else None


def operator_key(secret: bytes) -> str:
    """Return the operator's key that a value of the cluster secret stands for: it is made from it, and says nothing of it."""
    return hmac.new(secret, b"pdserve operator key 1", hashlib.sha256).hexdigest()


def digest_of(key: str) -> bytes:
    """Return what a key is looked up by."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _lines_of(raw: bytes) -> list[str]:
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError([f"holds more than {MAX_FILE_BYTES} bytes"])
    try:
        return raw.decode().split("\n")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError([f"line {number}: is not UTF-8 text"]) from None


def _fault_of(words: Sequence[str], shortest: int) -> str:
    """Return what is wrong with the words of a line, or ""."""
    if len(words) != 3:
        return f"has {len(words)} words; a line is OWNER SCOPE KEY"
    owner, scope, key = words
    if not OWNER_FORM.fullmatch(owner):
        return "the owner must be 1 to 64 of A-Z, a-z, 0-9, dot, dash and underscore, and begin with a letter or digit"
    if owner in RESERVED_OWNERS:
        return f"the owner may not be {owner}: that name is taken"
    if scope not in tuple(Scope):
        return f"the scope must be {' or '.join(Scope)}"
    fault = key_fault(key)
    if fault:
        return f"the key {fault}"
    return f"the key must have at least {shortest} characters off loopback" if len(key) < shortest else ""
