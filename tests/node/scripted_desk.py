"""A desk that only writes down what it is told: the Attach stream is what these tests are about."""

import asyncio
from dataclasses import dataclass, field

from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation, LegKey
from pdserve.core.work import LegOutcome, Work
from pdserve.node.desk import EngineFacts, Load
from pdserve.node.legs import Legs
from pdserve.node.pb import Peer


@dataclass
class ScriptedDesk:
    """Keeps what it was given; `num_waiting` is what it claims. A cancelled leg is released at once."""

    legs: Legs
    submitted: list[Work] = field(default_factory=list)
    cancelled: list[tuple[LegKey, str]] = field(default_factory=list)
    cancelled_sequences: list[tuple[LegKey, frozenset[int], str]] = field(default_factory=list)
    drained: list[LegKey] = field(default_factory=list)
    peers: tuple[Peer, ...] = ()
    num_waiting: int = 0
    connected: tuple[Incarnation, ...] = ()
    fault_of_transfers: str = ""

    def facts(self) -> EngineFacts:
        identity = Identity("w" * 64, "Tiny")
        return EngineFacts(identity, Capabilities("float32", "float32", ("float32",)), 8, 128, frozenset({2}), "")

    def submit(self, work: Work) -> None:
        self.submitted.append(work)

    def cancel(self, leg: LegKey, reason: str) -> None:
        self.cancelled.append((leg, reason))
        self.legs.refuse(leg, LegOutcome.CANCELLED, reason)

    def cancel_sequences(self, leg: LegKey, sequences: frozenset[int], reason: str) -> None:
        self.cancelled_sequences.append((leg, sequences, reason))

    def drain(self, leg: LegKey) -> None:
        self.drained.append(leg)
        self.legs.refuse(leg, LegOutcome.DRAINED, "draining")

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        self.peers = peers

    def tick(self, now_s: float) -> None:
        pass

    def load(self) -> Load:
        return Load(self.num_waiting, 0, 0, 8, 8, self.connected)

    def transfer_fault(self) -> str:
        return self.fault_of_transfers

    def step_age_s(self) -> float:
        return 0.0

    def gauges(self) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, object]:
        return {}

    def check_invariants(self) -> list[str]:
        return []

    async def run(self) -> None:
        pass

    async def wait_broken(self) -> str:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return] # never done

    def close(self) -> None:
        pass
