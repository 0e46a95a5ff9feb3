"""What a session is told. Leg events carry the node that spoke and the attempt it spoke of; the session sorts them."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.ids import Incarnation
from pdserve.core.work import LegOutcome, SampledToken, TokenScore


@dataclass(frozen=True, slots=True)
class Placed:
    """Nodes were chosen for the next attempt. `decode` is None when only one token remains."""

    prefill: Incarnation
    decode: Incarnation | None
    identity: str
    eos_token_ids: frozenset[int]

    def at_work(self, *, is_adopted: bool) -> frozenset[Incarnation]:
        """Return the nodes that an attempt still needs: after adoption the prefill node has done its part."""
        nodes = {self.decode} if is_adopted else {self.prefill, self.decode}
        return frozenset(node for node in nodes if node is not None)


@dataclass(frozen=True, slots=True)
class PlacementRefused:
    """No node can ever serve the request, or none may be waited for."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class Submitted:
    """The attempt's submits were handed to the streams."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The decode node promised blocks."""

    node: Incarnation
    attempt: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prefill node sampled the attempt's first token."""

    node: Incarnation
    attempt: int
    tokens: tuple[SampledToken, ...]
    num_cached_tokens: int
    durations_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The prefill node scored consecutive prompt tokens, from position `start` on."""

    node: Incarnation
    attempt: int
    start: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """The decode node verified and placed all KV."""

    node: Incarnation
    attempt: int
    tokens: tuple[SampledToken, ...]
    durations_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The decode node made tokens."""

    node: Incarnation
    attempt: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class LegEnded:
    """A leg came to its end, well or not."""

    node: Incarnation
    attempt: int
    outcome: LegOutcome
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LegReleased:
    """Nothing of a leg is left on its node."""

    node: Incarnation
    attempt: int
    durations_s: Mapping[str, float]
    kv_bytes: int = 0
    kv_frames: int = 0


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node's stream broke: it freed, or will free, all that this router owned."""

    node: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """The client cancelled or went away."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The router ends the session: the client reads too slowly, or the process stops."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer of the session may have expired."""


LegEvent = Granted | PromptScored | FirstToken | Adopted | Tokens | LegEnded | LegReleased
Event = Placed | PlacementRefused | Submitted | LegEvent | NodeLost | ClientLeft | Aborted | Tick
