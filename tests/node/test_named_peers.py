"""Peers as several routers name them: a second address for a node does not take the place of the first."""

import logging

import pytest

from pdserve.core.ids import Incarnation
from pdserve.node.named_peers import NamedPeers
from pdserve.node.pb import Peer
from tests.node.works import DECODE, PREFILL

FIRST, SECOND, THIRD = (Incarnation(letter * 16) for letter in (b"1", b"2", b"3"))
TRUE, FALSE = "tcp://127.0.0.1:1", "tcp://127.0.0.1:666"


def test_the_peers_of_all_routers_are_united() -> None:
    peers = NamedPeers()
    peers.name(FIRST, (Peer(DECODE, TRUE),))
    assert set(peers.name(SECOND, (Peer(DECODE, TRUE), Peer(PREFILL, "")))) == {Peer(DECODE, TRUE), Peer(PREFILL, "")}
    assert peers.name(SECOND, ()) == (Peer(DECODE, TRUE),)
    assert peers.name(FIRST, ()) == ()
    assert peers.num_conflicts == 0


@pytest.mark.parametrize("repeats", [False, True])
def test_the_first_address_stays_while_a_router_gives_it(repeats: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without a secret whoever attached last could have other users' KV sent to himself."""
    caplog.set_level(logging.ERROR)
    peers = NamedPeers()
    peers.name(FIRST, (Peer(DECODE, TRUE),))
    for _ in range(3):
        assert peers.name(SECOND, (Peer(DECODE, FALSE),)) == (Peer(DECODE, TRUE),)
        assert peers.num_conflicts == 1
        if repeats:
            assert peers.name(FIRST, (Peer(DECODE, TRUE),)) == (Peer(DECODE, TRUE),)
    [told] = caplog.messages
    assert all(word in told for word in (DECODE.hex()[:8], TRUE, FALSE, f"{TRUE} stays"))
    peers.name(THIRD, (Peer(DECODE, TRUE),))
    assert peers.name(FIRST, ()) == (Peer(DECODE, TRUE),)
    assert peers.name(THIRD, ()) == (Peer(DECODE, FALSE),)
    assert peers.num_conflicts == 0


def test_a_router_may_give_a_node_a_new_address_where_nobody_contradicts() -> None:
    peers = NamedPeers()
    peers.name(FIRST, (Peer(DECODE, TRUE),))
    assert peers.name(FIRST, (Peer(DECODE, FALSE),)) == (Peer(DECODE, FALSE),)
    assert peers.num_conflicts == 0


def test_an_admission_key_that_one_router_does_not_know_yet_is_taken_from_another() -> None:
    """A router that attached to a decode node anew took the node from all prefill nodes until its first status."""
    with_key, without = Peer(DECODE, TRUE, b"key"), Peer(DECODE, TRUE)
    peers = NamedPeers()
    assert peers.name(FIRST, (without,)) == (without,)
    assert peers.name(SECOND, (with_key,)) == (with_key,)
    assert peers.name(FIRST, (without,)) == (with_key,)
    assert peers.name(THIRD, (Peer(DECODE, FALSE, b"another"),)) == (with_key,)
    assert peers.name(SECOND, ()) == (without,)


def test_a_list_that_names_a_node_twice_is_no_way_around() -> None:
    peers = NamedPeers()
    assert peers.name(FIRST, (Peer(DECODE, TRUE), Peer(DECODE, FALSE))) == (Peer(DECODE, TRUE),)
