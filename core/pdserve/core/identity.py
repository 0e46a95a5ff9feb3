"""What two nodes must share before KV may move between them, as named fields so that a refusal can name them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

SALT_SCHEME = "sha256-chain-v1"


@dataclass(frozen=True)
class Identity:
    """Everything that decides what KV means. Two nodes are paired only if all of it is equal."""

    weight_digest: str
    architecture: str
    kv_fields: Mapping[str, str] = field(default_factory=dict)
    tokenizer_digest: str = ""
    salt_scheme: str = SALT_SCHEME

    def as_fields(self) -> dict[str, str]:
        """Return every field by name; `kv_fields` are flattened as `kv.<name>`."""
        named = {
            "weight_digest": self.weight_digest,
            "architecture": self.architecture,
            "tokenizer_digest": self.tokenizer_digest,
            "salt_scheme": self.salt_scheme,
        }
        return named | {f"kv.{name}": value for name, value in sorted(self.kv_fields.items())}

    def digest(self) -> str:
        """Return a SHA-256 over all fields, hex; computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self.as_fields(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: "Identity") -> list[str]:
        """Return the names of the fields that differ, sorted; empty means equal."""
        mine, theirs = self.as_fields(), other.as_fields()
        return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What two nodes agree upon by negotiation."""

    compute_dtype: str
    kv_dtype: str
    wire_dtypes: tuple[str, ...]

    def disagreements(self, other: "Capabilities") -> list[str]:
        """Return the names of the capabilities that cannot be reconciled, sorted.

        So far both sides must compute and store in the same dtype, and share a wire dtype.
        """
        faults = []
        if self.compute_dtype != other.compute_dtype:
            faults.append("compute_dtype")
        if self.kv_dtype != other.kv_dtype:
            faults.append("kv_dtype")
        if not set(self.wire_dtypes) & set(other.wire_dtypes):
            faults.append("wire_dtypes")
        return sorted(faults)
