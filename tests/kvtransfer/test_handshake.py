"""HELLO, WELCOME, REFUSE, CHALLENGE: who is let in, and by which name a refusal says why not."""

from dataclasses import replace

import pytest

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.identity import Capabilities
from pdserve.core.ids import new_incarnation
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.events import PeerDown, PeerRefused, PeerUp
from pdserve.kvtransfer.handshake import HELLO_LABEL, proof
from pdserve.kvtransfer.messages import PROTOCOL_VERSION, Ack, Beat, Challenge, Gone, Hello, Nack, Open, Refuse, Welcome
from pdserve.kvtransfer.settings import LinkSettings
from tests.kvtransfer.nodes import CAPABILITIES, IDENTITY, LAYOUT, settings
from tests.kvtransfer.world import World, failure, loss, peers_up

SECRET = ClusterSecret(b"a cluster secret")

OTHERS: dict[str, LinkSettings] = {
    "weight_digest": settings(identity=replace(IDENTITY, weight_digest="another")),
    "architecture": settings(identity=replace(IDENTITY, architecture="AnotherForCausalLM")),
    "tokenizer_digest": settings(identity=replace(IDENTITY, tokenizer_digest="another")),
    "salt_scheme": settings(identity=replace(IDENTITY, salt_scheme="another")),
    "kv.head_dim": settings(identity=replace(IDENTITY, kv_fields={**IDENTITY.kv_fields, "head_dim": "16"})),
    "kv.num_layers": settings(identity=replace(IDENTITY, kv_fields={"head_dim": "8"})),
    "kv.rope": settings(identity=replace(IDENTITY, kv_fields={**IDENTITY.kv_fields, "rope": "1"})),
    "compute_dtype": settings(capabilities=Capabilities("bfloat16", "float32", ("float32",))),
    "kv_dtype": settings(capabilities=Capabilities("float32", "bfloat16", ("float32",))),
    "wire_dtypes": settings(capabilities=Capabilities("float32", "float32", ("bfloat16",))),
    "layout.dtype": settings(layout=KvLayout(LAYOUT.layers, "bfloat16")),
    "layout.num_layers": settings(layout=KvLayout(LAYOUT.layers[:-1], "float32")),
    "layout.num_kv_heads": settings(layout=KvLayout((LayerLayout(4, 8, 8), *LAYOUT.layers[1:]), "float32")),
    "layout.key_dim": settings(layout=KvLayout((LayerLayout(2, 16, 8), *LAYOUT.layers[1:]), "float32")),
    "layout.value_dim": settings(layout=KvLayout((LayerLayout(2, 8, 16), *LAYOUT.layers[1:]), "float32")),
    "layout.window": settings(layout=KvLayout((LayerLayout(2, 8, 8, window=4), *LAYOUT.layers[1:]), "float32")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_field_that_differs_is_named(name: str) -> None:
    world = World(mine=OTHERS[name]).meet()
    assert world.sent == [PeerRefused(world.theirs.incarnation, (name,))]
    assert world.received == [PeerRefused(world.mine.incarnation, (name,))]
    assert world.said("<", Welcome) == []
    transfer_id = world.open(grant=False)
    assert world.sent_kinds(transfer_id) == ["SendFailed", "SendClosed"]


def test_every_identity_field_has_a_case() -> None:
    cases = {name for name in OTHERS if not name.startswith(("kv.", "layout."))} - {
        "compute_dtype",
        "kv_dtype",
        "wire_dtypes",
    }
    assert cases == {name for name in IDENTITY.as_fields() if not name.startswith("kv.")}


def test_several_differences_are_named_together() -> None:
    mine = settings(identity=replace(IDENTITY, architecture="x", weight_digest="y"), capabilities=CAPABILITIES)
    world = World(mine=mine).meet()
    assert world.sent == [PeerRefused(world.theirs.incarnation, ("architecture", "weight_digest"))]


def test_equal_nodes_meet() -> None:
    world = World().meet()
    assert world.sent == [PeerUp(world.theirs.incarnation)]
    assert world.received == [PeerUp(world.mine.incarnation)]
    assert world.said("<", Challenge) == []
    assert peers_up(world.sent) == {world.theirs.incarnation}
    assert peers_up(world.received) == {world.mine.incarnation}


def test_another_version_is_refused_by_name() -> None:
    world = World()
    world.receiver.set_peers(frozenset({world.mine.incarnation}), 0.0)
    hello = Hello(
        world.mine.incarnation, world.theirs.incarnation, b"n" * 16, None, protocol_version=PROTOCOL_VERSION + 1
    )
    world.receiver.message(Route(b"r"), hello, memoryview(b""), 0.0)
    world.settle()
    refusal = world.said("<", Refuse)[0]
    assert isinstance(refusal, Refuse)
    assert refusal.fields == ("protocol_version",)
    assert not refusal.can_retry


def test_a_hello_that_means_another_process_is_refused() -> None:
    world = World()
    world.receiver.set_peers(frozenset({world.mine.incarnation}), 0.0)
    hello = Hello(world.mine.incarnation, new_incarnation(), bytes(16), world.mine.offer)
    world.receiver.message(Route(b"r"), hello, memoryview(b""), 0.0)
    world.settle()
    assert [m.fields for m in world.said("<", Refuse) if isinstance(m, Refuse)] == [("incarnation",)]
    assert world.said("<", Welcome) == []


def test_a_restarted_receiver_is_another_peer() -> None:
    world = World()
    world.receiver.set_peers(frozenset({world.mine.incarnation}), 0.0)
    world.sender.set_peers({new_incarnation(): "there"}, 0.0)
    world.settle()
    assert [event.fields for event in world.sent if isinstance(event, PeerRefused)] == [("incarnation",)]
    assert peers_up(world.received) == set()


class TestSecret:
    @pytest.mark.parametrize(
        ("mine", "theirs"),
        [((b"new", b"old"), (b"old", b"new")), ((b"old",), (b"old", b"new")), ((b"new", b"old"), (b"new",))],
    )
    def test_while_it_is_changed_both_values_meet(self, mine: tuple[bytes, ...], theirs: tuple[bytes, ...]) -> None:
        world = World(settings(secret=ClusterSecret(*mine)), settings(secret=ClusterSecret(*theirs))).meet()
        assert world.sent == [PeerUp(world.theirs.incarnation)]

    def test_the_same_secret_meets_after_a_challenge(self) -> None:
        world = World(settings(secret=SECRET), settings(secret=SECRET)).meet()
        assert len(world.said("<", Challenge)) == 1
        assert world.sent == [PeerUp(world.theirs.incarnation)]

    def test_another_secret_is_refused(self) -> None:
        world = World(settings(secret=ClusterSecret(b"wrong")), settings(secret=SECRET)).meet()
        assert world.sent == [PeerRefused(world.theirs.incarnation, ("proof",), "the cluster secret differs")]
        assert peers_up(world.received) == set()

    def test_no_secret_against_one(self) -> None:
        world = World(settings(), settings(secret=SECRET)).meet()
        assert [event.fields for event in world.sent if isinstance(event, PeerRefused)] == [("secret",)]
        assert peers_up(world.received) == set()

    def test_a_receiver_without_the_secret_gets_nothing(self) -> None:
        world = World(settings(secret=SECRET), settings()).meet()
        assert [event.fields for event in world.sent if isinstance(event, PeerRefused)] == [("proof",)]

    def test_strangers_without_proof_learn_nothing(self) -> None:
        world = World(replace(OTHERS["architecture"], secret=None), settings(secret=SECRET)).meet()
        assert world.said("<", Refuse) == []

    def test_a_proof_over_no_challenge_is_none(self) -> None:
        world = World(theirs=settings(secret=SECRET))
        world.receiver.set_peers(frozenset({world.mine.incarnation}), 0.0)
        mine, theirs = world.mine.incarnation, world.theirs.incarnation
        proven = proof(SECRET.proving, HELLO_LABEL, b"", mine, theirs)
        world.receiver.message(
            Route(b"r"), Hello(mine, theirs, bytes(16), world.mine.offer, proven), memoryview(b""), 0.0
        )
        world.settle()
        assert [m.fields for m in world.said("<", Refuse) if isinstance(m, Refuse)] == [("proof",)]

    def test_a_proof_cannot_be_replayed(self) -> None:
        world = World(settings(secret=SECRET), settings(secret=SECRET)).meet()
        proven = [hello for hello in world.said(">", Hello) if isinstance(hello, Hello) and hello.proof]
        assert len(proven) == 1
        world.receiver.message(Route(b"replayed"), proven[0], memoryview(b""), world.now_s)
        world.settle()
        refusal = world.said("<", Refuse)[-1]
        assert isinstance(refusal, Refuse)
        assert refusal.fields == ("proof",)


class TestOrder:
    def test_hello_before_the_routers_list_is_parked(self) -> None:
        world = World()
        world.sender.set_peers({world.theirs.incarnation: "there"}, world.now_s)
        world.settle()
        assert world.sent == []
        world.receiver.set_peers(frozenset({world.mine.incarnation}), world.now_s)
        world.settle()
        assert world.sent == [PeerUp(world.theirs.incarnation)]
        assert world.num_dialled == 1

    def test_a_peer_that_nobody_names_is_refused_for_now_and_may_come_back(self) -> None:
        world = World()
        world.sender.set_peers({world.theirs.incarnation: "there"}, world.now_s)
        world.advance(world.theirs.park_s + 0.3)
        refusal = world.said("<", Refuse)[0]
        assert isinstance(refusal, Refuse)
        assert (refusal.fields, refusal.can_retry) == (("peer",), True)
        world.receiver.set_peers(frozenset({world.mine.incarnation}), world.now_s)
        world.advance(1.0)
        assert world.sent == [PeerUp(world.theirs.incarnation)]

    def test_nobody_listens_at_first(self) -> None:
        world = World()
        world.answers = False
        world.meet()
        world.advance(5.0)
        assert world.sent == []
        assert 5 <= world.num_dialled <= 12, "dialled again, with growing pauses"
        world.answers = True
        world.advance(1.5)
        assert world.sent == [PeerUp(world.theirs.incarnation)]

    def test_nothing_is_accepted_before_welcome(self) -> None:
        world = World()
        world.receiver.set_peers(frozenset({world.mine.incarnation}), 0.0)
        _, theirs = world.specs()
        world.receiver.expect(theirs, 0.0)
        for message in (Beat(), Ack(theirs.transfer_id)):
            world.receiver.message(Route(b"stranger"), message, memoryview(b""), 0.0)
        world.settle()
        assert {message.fields for message in world.said("<", Refuse) if isinstance(message, Refuse)} == {("hello",)}
        assert world.receiver.gauges()["kv_strange_total"] == 2
        assert world.receiver.gauges()["kv_links"] == 0
        assert world.said("<", Gone) == world.said("<", Nack) == []

    def test_a_parked_peer_cannot_open(self) -> None:
        world = World()
        mine, theirs = world.specs()
        world.receiver.expect(theirs, 0.0)
        world.sender.set_peers({world.theirs.incarnation: "there"}, world.now_s)
        world.settle()
        for message in (Open(mine.transfer_id, 1, bytes(32), 20), Beat()):
            world.receiver.message(next(iter(world.alive)), message, memoryview(b""), world.now_s)
        world.settle()
        assert world.received == []
        assert world.receiver.gauges()["kv_strange_total"] == 2

    def test_pending_handshakes_are_bounded_and_expire(self) -> None:
        world = World(theirs=settings(max_parked=3))
        for number in range(10):
            hello = Hello(new_incarnation(), world.theirs.incarnation, bytes(16), world.mine.offer)
            world.receiver.message(Route(b"%d" % number), hello, memoryview(b""), 0.0)
            world.receiver.check_invariants()
        assert world.receiver.gauges()["kv_links"] == 3
        world.settle()
        refused = [message for message in world.said("<", Refuse) if isinstance(message, Refuse)]
        assert [(message.fields, message.can_retry) for message in refused] == [(("handshakes",), True)] * 7
        world.advance(5.0)
        assert world.receiver.gauges()["kv_links"] == 0

    @pytest.mark.parametrize("knows_it", [True, False])
    def test_half_handshakes_keep_nobody_out(self, knows_it: bool) -> None:
        """Strangers that say HELLO and never answer the challenge, more of them than there is room for, renewed at any time."""
        secret = ClusterSecret(b"the secret")
        mine = settings(secret=secret if knows_it else ClusterSecret(b"another"))
        world = World(mine, settings(secret=secret))

        def strangers(number: int) -> None:
            for _ in range(number):
                hello = Hello(new_incarnation(), world.theirs.incarnation, bytes(16), world.mine.offer)
                world.receiver.message(Route(new_incarnation()), hello, memoryview(b""), world.now_s)
                world.receiver.check_invariants()

        strangers(2 * world.theirs.max_parked)
        world.receiver.set_peers(frozenset({mine.incarnation}), world.now_s)
        world.sender.set_peers({world.theirs.incarnation: "there"}, world.now_s)
        world._execute()
        world._deliver()
        assert not world.sent, "it is challenged, and has not answered"
        strangers(world.theirs.max_parked - 1)
        world.settle()
        strangers(world.theirs.max_parked)
        assert world.receiver.gauges()["kv_links_up"] == (1 if knows_it else 0)

    def test_half_handshakes_do_not_displace_who_waits_to_be_named(self) -> None:
        secret = ClusterSecret(b"the secret")
        mine = settings(secret=secret)
        world = World(mine, settings(secret=secret, max_parked=4))
        world.sender.set_peers({world.theirs.incarnation: "there"}, world.now_s)
        world.settle()
        for _ in range(20):
            hello = Hello(new_incarnation(), world.theirs.incarnation, bytes(16), world.mine.offer)
            world.receiver.message(Route(new_incarnation()), hello, memoryview(b""), world.now_s)
        world.receiver.check_invariants()
        world.receiver.set_peers(frozenset({mine.incarnation}), world.now_s)
        world.settle()
        assert world.receiver.gauges()["kv_links_up"] == 1

    def test_the_oldest_of_those_that_wait_to_be_named_makes_room(self) -> None:
        """Without a secret all of them have proved the same: nothing."""
        world = World(theirs=settings(max_parked=4))
        peers = [new_incarnation() for _ in range(6)]
        for number, peer in enumerate(peers):
            hello = Hello(peer, world.theirs.incarnation, bytes(16), world.mine.offer)
            world.receiver.message(Route(b"%d" % number), hello, memoryview(b""), world.now_s)
        world.receiver.set_peers(frozenset(peers), world.now_s)
        world.settle()
        assert [event.incarnation for event in world.received if isinstance(event, PeerUp)] == peers[2:]

    def test_a_repeated_hello_gets_the_same_answer(self) -> None:
        world = World().meet()
        hello = world.said(">", Hello)[0]
        world.receiver.message(next(iter(world.alive)), hello, memoryview(b""), world.now_s)
        world.settle()
        assert len(world.said("<", Welcome)) == 2
        assert world.received == [PeerUp(world.mine.incarnation)]


class TestLease:
    def test_beats_keep_an_idle_link_up(self) -> None:
        world = World().meet()
        world.advance(20.0)
        assert world.sent == [PeerUp(world.theirs.incarnation)]
        assert 35 <= len(world.said(">", Beat)) <= 45
        assert 35 <= len(world.said("<", Beat)) <= 45

    def test_silence_ends_it_on_both_sides_and_it_comes_back(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.fault = lambda *args: []
        world.advance(world.mine.lease_s + 0.6)
        assert PeerDown(world.theirs.incarnation, "lease expired") in world.sent
        assert any(isinstance(event, PeerDown) for event in world.received)
        assert world.sent_kinds(transfer_id) == ["Granted"]
        world.advance(world.mine.connect_wait_s)
        assert failure(world, transfer_id) == "peer_lost"
        world.advance(2 * world.theirs.lease_s + 1.0)
        assert loss(world, transfer_id) == "peer_lost"
        world.fault = lambda *args: [args[3]]
        world.advance(world.mine.lease_s + world.mine.park_s + 2.0)
        assert peers_up(world.sent) == {world.theirs.incarnation}
        other = world.open()
        world.send_all(other)
        assert world.sent_kinds(other) == ["Granted", "Acked", "SendClosed"]
        world.assert_nothing_left()

    @pytest.mark.parametrize("to_receiver", [True, False])
    def test_silence_one_way_is_noticed_by_the_side_that_hears_nothing(self, to_receiver: bool) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.fault = lambda way, k, message, frames: [] if way is to_receiver else [frames]
        world.advance(world.mine.lease_s + 0.6)
        deaf = world.received if to_receiver else world.sent
        assert [event.reason for event in deaf if isinstance(event, PeerDown)] == ["lease expired"]
        world.advance(world.mine.connect_wait_s + 3 * world.mine.lease_s)
        assert failure(world, transfer_id) == loss(world, transfer_id) == "peer_lost"

    def test_own_lateness_lengthens_the_lease(self) -> None:
        world = World().meet()
        world.fault = lambda *args: []
        for table in (world.sender, world.receiver):
            table.extend_leases(2.0)
        world.advance(world.mine.lease_s + 1.0)
        assert not any(isinstance(event, PeerDown) for event in [*world.sent, *world.received])
        world.advance(2.0)
        assert any(isinstance(event, PeerDown) for event in world.sent)
        assert any(isinstance(event, PeerDown) for event in world.received)

    def test_a_new_connection_supersedes_the_old_one(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.cut(tell_receiver=False)
        assert world.received_kinds(transfer_id) == ["Opened"]
        world.advance(0.5)
        links = [type(event) for event in world.received if isinstance(event, PeerUp | PeerDown)]
        assert links == [PeerUp, PeerDown, PeerUp], "down before up again"
        assert world.received_kinds(transfer_id) == ["Opened", "Reopened"]


class TestPeersThatGo:
    def test_a_dropped_peer_goes_at_once_when_idle(self) -> None:
        world = World().meet()
        world.sender.set_peers({}, world.now_s)
        world.settle()
        assert world.sent[-1] == PeerDown(world.theirs.incarnation, "dropped")
        assert world.sender.gauges()["kv_links"] == world.receiver.gauges()["kv_links"] == 0

    def test_a_dropped_peer_finishes_what_it_has(self) -> None:
        world = World().meet()
        transfer_id = world.open()
        world.sender.set_peers({}, world.now_s)
        world.receiver.set_peers(frozenset(), world.now_s)
        world.settle()
        assert world.sender.gauges()["kv_links_up"] == 1, "it stays until its transfer is over"
        world.send_all(transfer_id)
        assert world.sent_kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
        assert world.sender.gauges()["kv_links"] == world.receiver.gauges()["kv_links"] == 0

    def test_a_changed_address_is_a_new_link(self) -> None:
        world = World().meet()
        world.sender.set_peers({world.theirs.incarnation: "elsewhere"}, world.now_s)
        world.settle()
        assert world.num_dialled == 2
        assert peers_up(world.sent) == {world.theirs.incarnation}
