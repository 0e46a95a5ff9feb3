"""What each role puts behind the Attach stream: a desk that takes legs, on the event loop's thread only."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pdserve.core.errors import InternalError
from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation, LegKey
from pdserve.core.work import Work
from pdserve.node.pb import Peer


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a node is. Blocks are counted in the node's own block size."""

    num_waiting: int
    num_running: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    connected_peers: tuple[Incarnation, ...]
    kv_admission_key: bytes = b""
    """What a decode node's KV connections are opened with for now."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a loaded engine says of itself in hello."""

    identity: Identity
    capabilities: Capabilities
    num_blocks: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    kv_address: str


class Desk(Protocol):
    """The work of one role. Every call returns at once; results go to `Legs`."""

    def facts(self) -> EngineFacts:
        """Return what hello says."""
        ...

    def submit(self, work: Work) -> None:
        """Take a leg that `Legs` has just opened."""
        ...

    def cancel(self, leg: LegKey, reason: str) -> None:
        """End a leg that `Legs` knows; `released` follows when nothing of it is left."""
        ...

    def cancel_sequences(self, leg: LegKey, sequences: frozenset[int], reason: str) -> None:
        """End some sequences of a leg, by index in the request; the leg goes on with the others, or ends if none is left."""
        ...

    def drain(self, leg: LegKey) -> None:
        """Hand a leg back to its router: as cancel, with the outcome DRAINED."""
        ...

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Take the nodes of the other role, over all routers."""
        ...

    def tick(self, now_s: float) -> None:
        """Act on deadlines that passed. Called twice a second."""
        ...

    def load(self) -> Load:
        """Return the present load."""
        ...

    def step_age_s(self) -> float:
        """Return the age of the running step, seconds; 0 when none runs."""
        ...

    def transfer_fault(self) -> str:
        """Return what keeps transfers from working although peers are connected; "" if nothing is known."""
        ...

    def gauges(self) -> dict[str, float]:
        """Return the role's gauges by name."""
        ...

    def describe(self) -> dict[str, object]:
        """Return every machine's state and age."""
        ...

    def check_invariants(self) -> list[str]:
        """Return what is wrong; empty when all is well."""
        ...

    async def run(self) -> None:
        """Run the step loop until cancelled."""
        ...

    async def wait_broken(self) -> str:
        """Return why the desk cannot go on, once it cannot: the process should end, and be started again."""
        ...

    def close(self) -> None:
        """Stop threads and sockets. Every leg has been released or abandoned."""
        ...


def violations(checks: Iterable[Callable[[], None]]) -> list[str]:
    """Run every check and return what those that raised had to say."""
    found = []
    for check in checks:
        try:
            check()
        except (InternalError, AssertionError) as error:
            found.append(str(error))
    return found
