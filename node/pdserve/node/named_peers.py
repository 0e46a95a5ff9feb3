"""The nodes of the other role as all routers name them, one address for each."""

import logging
from collections.abc import Mapping

from pdserve.core.ids import Incarnation
from pdserve.node.pb import Peer

logger = logging.getLogger(__name__)


class NamedPeers:
    """What each attached router names. Two routers that give one node different addresses are a conflict.

    Then the address that was there first stays for as long as a router gives it: a router that came later, or someone who passes
    for one, cannot turn KV away from where it goes.
    """

    def __init__(self) -> None:
        self._by_router: dict[Incarnation, Mapping[Incarnation, Peer]] = {}
        self._held: dict[Incarnation, Peer] = {}
        self._conflicts: dict[Incarnation, frozenset[str]] = {}

    @property
    def num_conflicts(self) -> int:
        """Nodes for which routers give different addresses now."""
        return len(self._conflicts)

    def name(self, router: Incarnation, peers: tuple[Peer, ...]) -> tuple[Peer, ...]:
        """Take the complete list of one router; empty if it is gone. Return the peers of all routers."""
        if peers:
            self._replace(router, peers)
        else:
            self._by_router.pop(router, None)
        named: dict[Incarnation, list[Peer]] = {}
        for theirs in self._by_router.values():
            for incarnation, peer in theirs.items():
                named.setdefault(incarnation, []).append(peer)
        self._held = {incarnation: self._chosen(incarnation, offers) for incarnation, offers in named.items()}
        self._look_for_conflicts(router, named)
        return tuple(self._held.values())

    def _replace(self, router: Incarnation, peers: tuple[Peer, ...]) -> None:
        theirs: dict[Incarnation, Peer] = {}
        for peer in peers:
            theirs.setdefault(peer.incarnation, peer)
        self._by_router[router] = theirs

    def _chosen(self, incarnation: Incarnation, offers: list[Peer]) -> Peer:
        held = self._held.get(incarnation)
        same = [peer for peer in offers if held is not None and peer.kv_address == held.kv_address]
        address = (same or offers)[0].kv_address
        # A router that has just attached to the node knows no admission key yet; without one the node would count as not there.
        return max(
            (peer for peer in offers if peer.kv_address == address), key=lambda peer: bool(peer.kv_admission_key)
        )

    def _look_for_conflicts(self, router: Incarnation, named: Mapping[Incarnation, list[Peer]]) -> None:
        addresses = {
            incarnation: frozenset(peer.kv_address for peer in offers) for incarnation, offers in named.items()
        }
        before, self._conflicts = self._conflicts, {i: given for i, given in addresses.items() if len(given) > 1}
        for incarnation, given in self._conflicts.items():
            if before.get(incarnation) != given:
                logger.error(
                    "routers give different KV addresses for node %s: %s; %s stays, which was named first",
                    incarnation.hex()[:8],
                    " and ".join(sorted(address or "none" for address in given)),
                    self._held[incarnation].kv_address or "none",
                    extra={"peer": router.hex()[:8]},
                )
