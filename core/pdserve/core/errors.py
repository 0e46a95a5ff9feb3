"""The error tree.

PdserveError
├── InvalidRequest          can never work as sent; names the field
├── NotServed               a field that this version does not serve; names it
├── GrammarNotServed        a structured output that cannot be served; says why
├── GrammarTooSlow          a structured output that takes too long to compile
├── UnknownModel            no such model here
├── Overloaded              queues are full; carries when to retry
├── SlowReader              the client read too slowly for too long
├── NoNodes                 a pool has no usable node
├── Unreachable             nothing answers at the address (raised by clients)
├── AttemptsExhausted       every allowed attempt failed; carries how many tokens were sent
├── DeadlineExceeded        the client's deadline passed
├── Cancelled               the client went away
├── Unauthenticated         credentials are missing or wrong
├── Forbidden               credentials do not allow it
├── Draining                the process takes no new work
├── InternalError           a fault of ours; an invariant broke
└── SetupError              the process cannot start or go on as configured
    ├── ConfigError         settings are wrong; lists every fault
    ├── ModelUnavailable    a model cannot be had, or is damaged
    ├── ModelUnsupported    a model cannot be served by this engine
    └── AddressInUse        a port is taken

`GRPC_CODES` maps each class to its gRPC status code by name; `pdserve.rpc.errors` does the translation.
"""

from collections.abc import Mapping
from copy import copy
from typing import ClassVar, Self


class PdserveError(Exception):
    """Base of all errors that a user may see: a message, a hint that says what to do, and the field at fault.

    `operators_hint` is what operators are told instead of the hint: only there may addresses of nodes stand.
    """

    can_retry: ClassVar[bool] = False
    """Whether the same request may succeed later without being changed."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        operators_hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})
        self.operators_hint = operators_hint

    def for_operator(self) -> Self:
        """Return the error as operators are told it."""
        if not self.operators_hint:
            return self
        told = copy(self)
        told.hint, told.operators_hint = self.operators_hint, ""
        return told

    @property
    def reason(self) -> str:
        """Stable upper-snake name for `google.rpc.ErrorInfo.reason`, e.g. INVALID_REQUEST."""
        name = type(self).__name__
        return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()

    def __str__(self) -> str:
        """Return message and hint in one line."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(PdserveError):
    """The request can never work as sent."""


class NotServed(PdserveError):
    """The request uses a field that this version does not serve."""


class GrammarNotServed(PdserveError):
    """The answer should belong to a language that cannot be served."""


class GrammarTooSlow(PdserveError):
    """The answer should belong to a language that takes too long to compile."""


class UnknownModel(PdserveError):
    """The named model is not served here."""


class Overloaded(PdserveError):
    """Queues are full; `retry_after_s` says when to come back."""

    can_retry = True


class SlowReader(PdserveError):
    """The client read its answer too slowly for too long."""


class NoNodes(PdserveError):
    """A pool has no usable node."""

    can_retry = True


class Unreachable(PdserveError):
    """Nothing answers at the address; raised on the client's side, never sent by a server."""

    can_retry = True


class AttemptsExhausted(PdserveError):
    """Every allowed attempt failed. `metadata["num_tokens_sent"]` says how many tokens the client was given."""

    can_retry = True


class DeadlineExceeded(PdserveError):
    """The client's deadline passed."""


class Cancelled(PdserveError):
    """The client cancelled, or went away."""


class Unauthenticated(PdserveError):
    """Credentials are missing or wrong."""


class Forbidden(PdserveError):
    """Credentials do not allow this."""


class Draining(PdserveError):
    """The process takes no new work."""

    can_retry = True


class InternalError(PdserveError):
    """A fault of pdserve itself."""


class SetupError(PdserveError):
    """The process cannot start, or go on, as configured."""


class ConfigError(SetupError):
    """Settings are wrong. `faults` lists all of them, not only the first."""

    def __init__(self, faults: list[str], *, hint: str = "") -> None:
        super().__init__("wrong settings:\n" + "\n".join(f"  - {fault}" for fault in faults), hint=hint)
        self.faults = faults


class ModelUnavailable(SetupError):
    """A model cannot be had, or its files are damaged."""


class ModelUnsupported(SetupError):
    """A model cannot be served by this engine."""


class AddressInUse(SetupError):
    """A port is taken by another process."""


GRPC_CODES: Mapping[type[PdserveError], str] = {
    InvalidRequest: "INVALID_ARGUMENT",
    NotServed: "UNIMPLEMENTED",
    GrammarNotServed: "INVALID_ARGUMENT",
    GrammarTooSlow: "INVALID_ARGUMENT",
    UnknownModel: "NOT_FOUND",
    Overloaded: "RESOURCE_EXHAUSTED",
    SlowReader: "RESOURCE_EXHAUSTED",
    NoNodes: "UNAVAILABLE",
    Unreachable: "UNAVAILABLE",
    AttemptsExhausted: "UNAVAILABLE",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    Cancelled: "CANCELLED",
    Unauthenticated: "UNAUTHENTICATED",
    Forbidden: "PERMISSION_DENIED",
    Draining: "FAILED_PRECONDITION",
    InternalError: "INTERNAL",
    SetupError: "FAILED_PRECONDITION",
    ConfigError: "FAILED_PRECONDITION",
    ModelUnavailable: "FAILED_PRECONDITION",
    ModelUnsupported: "FAILED_PRECONDITION",
    AddressInUse: "FAILED_PRECONDITION",
}
