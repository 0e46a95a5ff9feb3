"""What the router knows of a node: what it said in hello, its last status, and what this router has placed on it since."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation
from pdserve.router.pool_size import PoolSize

ROUTER_STOPS = "the router stops"
"""Why a stream ends that this router itself lets go."""


class NodeState(StrEnum):
    """A node as GetClusterState names it."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where a decode node takes KV for a range of heads; `head_end` 0 means all."""

    address: str
    head_start: int = 0
    head_end: int = 0


@dataclass(frozen=True)
class Hello:
    """A node's first message."""

    process: ProcessInfo
    identity: Identity
    capabilities: Capabilities
    kv_endpoints: tuple[KvEndpoint, ...]
    num_blocks: int
    max_model_len: int
    lease_s: float
    eos_token_ids: frozenset[int]

    @property
    def incarnation(self) -> Incarnation:
        """This run of the node."""
        return self.process.incarnation

    def differences(self, other: "Hello") -> list[str]:
        """Return the names of the fields for which KV can never move between the two; empty if it can."""
        return self.identity.differences(other.identity) + self.capabilities.disagreements(other.capabilities)


@dataclass(frozen=True, slots=True)
class Status:
    """A node's load, as it reported it. Blocks are counted in the node's own block size."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    is_draining: bool = False
    connected_peers: frozenset[Incarnation] = frozenset()
    gauges: Mapping[str, float] = field(default_factory=dict)
    kv_admission_key: bytes = b""
    """What KV connections to the node are opened with; passed on to its peers."""


@dataclass(frozen=True)
class NodeLoad:
    """One usable node as placement sees it. Numbers include what this router placed and the node has not reported yet."""

    incarnation: Incarnation
    role: Role
    identity: str
    capabilities: Capabilities
    block_size: int
    max_model_len: int
    num_waiting: int
    num_running: int
    num_waiting_tokens: int
    num_free_blocks: int
    num_blocks: int = 0
    connected_peers: frozenset[Incarnation] = frozenset()
    is_doubtful: bool = False
    """It may be lost: it counts as busy until that is known."""

    @property
    def pool(self) -> PoolSize:
        """The size of its pool."""
        return PoolSize(self.num_blocks, self.block_size)


LegId = tuple[int, int]
"""Session number and attempt."""


class NodeLedger:
    """What this router placed on one node: legs that the node's status may not show yet.

    A load is at least what this router itself has there, and at least the last report plus what was placed since. (A
    report may have been under way when a leg was placed or started: it alone would show a busy node as idle.)
    """

    def __init__(self) -> None:
        self._outstanding: dict[LegId, int] = {}
        self._running: set[LegId] = set()
        self._num_since = 0
        self._tokens_since = 0

    @property
    def num_outstanding(self) -> int:
        """Legs that were placed and did not start to give tokens."""
        return len(self._outstanding)

    @property
    def num_running(self) -> int:
        """Legs that gave tokens and are not over."""
        return len(self._running)

    def place(self, leg: LegId, num_tokens: int) -> None:
        """Note a leg that will keep `num_tokens` positions busy."""
        self._outstanding[leg] = num_tokens
        self._num_since += 1
        self._tokens_since += num_tokens

    def started(self, leg: LegId) -> None:
        """Note that the leg gives tokens. Said twice, or of a leg that is over, it means nothing more."""
        if self._outstanding.pop(leg, None) is not None:
            self._running.add(leg)

    def over(self, leg: LegId) -> None:
        """Note that nothing of the leg runs any more. Said twice it means nothing more."""
        self._outstanding.pop(leg, None)
        self._running.discard(leg)

    def reported(self) -> None:
        """Note that a status came: it holds what was placed before."""
        self._num_since = self._tokens_since = 0

    def load(self, hello: Hello, status: Status, *, is_doubtful: bool = False) -> NodeLoad:
        """Return the node's load."""
        block_size = max(1, hello.process.block_size)
        waiting_tokens = max(status.num_waiting_tokens + self._tokens_since, sum(self._outstanding.values()))
        return NodeLoad(
            incarnation=hello.incarnation,
            role=hello.process.role,
            identity=hello.identity.digest(),
            capabilities=hello.capabilities,
            block_size=block_size,
            max_model_len=hello.max_model_len,
            num_waiting=max(status.num_waiting + self._num_since, len(self._outstanding)),
            num_running=max(status.num_running, len(self._running)),
            num_waiting_tokens=waiting_tokens,
            num_free_blocks=status.num_free_blocks - self._tokens_since // block_size,
            num_blocks=hello.num_blocks,
            connected_peers=status.connected_peers,
            is_doubtful=is_doubtful,
        )
