"""Proofs and tickets: what is good once, for one purpose, and what is not."""

import grpc
import pytest

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import Unauthenticated
from pdserve.rpc.options import channel_options
from pdserve.rpc.secret import ATTACH_NODE, ATTACH_ROUTER, CALL_TICKET, fresh_nonce, proof, proven_with, stream_parts
from pdserve.rpc.tickets import HEADER, MAX_ISSUED, MAX_PEERS, TICKET_S, TicketOffice, ticket_metadata
from pdserve.v1 import node_pb2, node_pb2_grpc
from tests.rpc.recorder import recording

OLD, NEW = b"the old secret of the test", b"the new secret of the test"
PEER = "ipv4:127.0.0.1:1"


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def office(clock: Clock) -> TicketOffice:
    return TicketOffice(ClusterSecret(OLD), clock)


def ticket_for(office: TicketOffice, method: str = "Drain", value: bytes = OLD) -> list[tuple[str, str | bytes]]:
    """Return the metadata of an honest caller."""
    nonce = fresh_nonce()
    answer = office.issue(node_pb2.ProveRequest(nonce=nonce), PEER)
    return [(HEADER, answer.nonce + proof(value, CALL_TICKET, nonce, answer.nonce, method.encode()))]


def test_parts_cannot_be_shifted_into_each_other() -> None:
    assert proof(OLD, b"ab", b"c") != proof(OLD, b"a", b"bc")
    assert proof(OLD, b"a", b"b", b"") != proof(OLD, b"a", b"b")


def test_a_proof_is_of_no_use_in_the_other_direction_or_with_another_part() -> None:
    secret = ClusterSecret(NEW, OLD)
    parts = stream_parts(b"n" * 32, b"m" * 32, b"r" * 16, 1)
    given = proof(OLD, ATTACH_NODE, *parts)
    assert proven_with(given, secret, ATTACH_NODE, *parts) == OLD
    assert proven_with(given, secret, ATTACH_ROUTER, *parts) is None
    for other in ((b"x" * 32, *parts[1:]), (parts[0], b"x" * 32, *parts[2:]), (*parts[:3], (2).to_bytes(8, "big"))):
        assert proven_with(given, secret, ATTACH_NODE, *other) is None
    assert proven_with(b"", secret, ATTACH_NODE, *parts) is None


def test_the_secret_is_not_in_a_proof() -> None:
    assert OLD not in proof(OLD, ATTACH_NODE, b"nonce")


def test_a_ticket_is_good_once(office: TicketOffice) -> None:
    ticket = ticket_for(office)
    office.check(ticket, "Drain", PEER)
    with pytest.raises(Unauthenticated) as refused:
        office.check(ticket, "Drain", PEER)
    assert "--cluster-secret-file" in refused.value.hint


def test_a_ticket_is_good_for_one_method_and_connection_and_time(office: TicketOffice, clock: Clock) -> None:
    for method, peer, wait_s in (
        ("GetState", PEER, 0.0),
        ("Drain", "ipv4:127.0.0.1:2", 0.0),
        ("Drain", PEER, 2 * TICKET_S),
    ):
        ticket = ticket_for(office)
        clock.s += wait_s
        with pytest.raises(Unauthenticated):
            office.check(ticket, method, peer)
    office.check(ticket_for(office), "Drain", PEER)


@pytest.mark.parametrize("raw", [b"", b"x", b"n" * 32, b"n" * 64, b"n" * 5000])
def test_what_is_no_ticket_is_refused(office: TicketOffice, raw: bytes) -> None:
    for metadata in (None, [(HEADER, raw)], [("other", raw)]):
        with pytest.raises(Unauthenticated):
            office.check(metadata, "Drain", PEER)


def test_a_ticket_of_another_secret_is_refused(office: TicketOffice) -> None:
    with pytest.raises(Unauthenticated, match="differs"):
        office.check(ticket_for(office, value=NEW), "Drain", PEER)


def test_nonces_are_bounded_and_the_newest_stay(office: TicketOffice) -> None:
    first = ticket_for(office)
    tickets = [ticket_for(office) for _ in range(MAX_ISSUED)]
    assert len(office._issued[PEER]) == MAX_ISSUED
    for ticket in tickets:
        office.check(ticket, "Drain", PEER)
    with pytest.raises(Unauthenticated):
        office.check(first, "Drain", PEER)
    assert not office._issued


def test_who_asks_for_many_proofs_takes_no_other_s_ticket(office: TicketOffice) -> None:
    ticket = ticket_for(office)
    for number in range(2 * MAX_PEERS):
        office.issue(node_pb2.ProveRequest(nonce=b"n" * 32), "ipv4:127.0.0.1:9" if number % 2 else PEER + "9")
    office.check(ticket, "Drain", PEER)
    for number in range(2 * MAX_PEERS):
        office.issue(node_pb2.ProveRequest(nonce=b"n" * 32), f"ipv4:127.0.0.1:{number}")
    assert len(office._issued) == MAX_PEERS


def test_no_proof_is_made_without_a_whole_nonce(office: TicketOffice) -> None:
    for nonce in (b"", b"n" * 31, b"n" * 33):
        with pytest.raises(Unauthenticated):
            office.issue(node_pb2.ProveRequest(nonce=nonce), PEER)


def test_without_a_secret_everyone_may_call() -> None:
    office = TicketOffice(None, Clock())
    assert office.issue(node_pb2.ProveRequest(nonce=b"n" * 32), PEER) == node_pb2.ProveResponse()
    office.check(None, "Drain", PEER)


@pytest.mark.asyncio
@pytest.mark.parametrize("answers", ["nothing", "its nonce", "a proof of another secret"])
async def test_a_stranger_gets_a_nonce_and_no_ticket(answers: str) -> None:
    """Failure class 35 for single calls."""

    async def script(messages, send):  # type: ignore[no-untyped-def] # a Script
        nonce = node_pb2.ProveRequest.FromString(await anext(messages)).nonce
        answer = {
            "nothing": node_pb2.ProveResponse(),
            "its nonce": node_pb2.ProveResponse(nonce=nonce, proof=nonce),
            "a proof of another secret": node_pb2.ProveResponse(
                nonce=nonce, proof=proof(NEW, ATTACH_NODE, nonce, nonce)
            ),
        }[answers]
        await send(answer.SerializeToString())

    async with (
        recording(script) as stranger,
        grpc.aio.insecure_channel(stranger.address, options=channel_options()) as channel,
    ):
        stub = node_pb2_grpc.NodeServiceStub(channel)
        with pytest.raises(Unauthenticated, match="does not prove"):
            await ticket_metadata(stub, ClusterSecret(OLD), "Drain", 20.0)
    assert stranger.methods == ["/pdserve.v1.NodeService/Prove"]
    assert [len(node_pb2.ProveRequest.FromString(message).nonce) for message in stranger.messages] == [32]
    assert OLD not in stranger.everything
    assert HEADER.encode() not in stranger.everything
