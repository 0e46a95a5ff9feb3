"""A stranger at the KV port, and an impostor where a decode node was: memory and descriptors stay flat, service goes on.

Failure classes 34 and 35. The same strangers meet real processes in `tests/e2e/test_strangers.py`.
"""

import contextlib
import select
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.kvtransfer import SendFailed, zeromq
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import Arrived, Connected, Lost
from pdserve.kvtransfer.strangers import GREETING_BYTES, MAX_STRANGERS
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.channel_ends import has, polled
from tests.kvtransfer.hostile import ATTACKS, MIB, Impostor, Peer, framed, greeting, plain_hello
from tests.kvtransfer.nodes import Pair, check_a_transfer_works, wait_until
from tests.kvtransfer.relay import Wire

SECRET = ClusterSecret(b"a cluster secret of the test")
FEW_MIB = 64
"""Less than a tenth of what three endless messages would come to; other threads of this process allocate too."""


def resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / MIB


def num_descriptors() -> int:
    return psutil.Process().num_fds()


@pytest.fixture(params=[None, SECRET], ids=["no secret", "secret"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair.gated(request.param).start()
    check_a_transfer_works(made)
    yield made
    made.stop()


class TestStrangersAtTheKvPort:
    """Whoever has not been admitted gets no message, no id and no memory."""

    @pytest.mark.parametrize("attack", ATTACKS)
    def test_it_is_hung_up_on_at_once_and_costs_nothing(self, pair: Pair, attack: str) -> None:
        before = resident_mib()
        for _ in range(3):
            with Peer(pair.receiver.endpoint) as stranger:
                ATTACKS[attack](stranger)
                assert stranger.is_hung_up_on()
                assert stranger.num_sent < 32 * MIB, "far more than a greeting was taken"
            check_a_transfer_works(pair)
        assert resident_mib() - before < FEW_MIB
        wait_until(lambda: pair.receiver.gauges()["kv_strangers"] == 0, "nobody is a stranger any more")
        assert pair.receiver.gauges()["kv_strange_total"] == pair.receiver.gauges()["kv_bad_frames_total"] == 0

    def test_a_flood_of_connections_shuts_nobody_out(self, pair: Pair) -> None:
        before = num_descriptors()
        strangers: list[Peer] = []
        with contextlib.ExitStack() as stack:
            for number in range(6 * MAX_STRANGERS):
                strangers.append(stack.enter_context(Peer(pair.receiver.endpoint)))
                if number % 2:
                    strangers[-1].say(greeting(b"PLAIN"))
            own = len(strangers)
            wait_until(lambda: num_descriptors() - before - own <= MAX_STRANGERS, "the oldest made room")
            # While they are there: a new link, and a transfer on it.
            pair.sender.set_peers({})
            wait_until(lambda: not pair.sender.gauges()["kv_links"], "the old link is dropped")
            pair.dial()
            wait_until(lambda: pair.sender.gauges()["kv_links_up"] == 1, "a new link stands")
            check_a_transfer_works(pair)
        wait_until(lambda: num_descriptors() <= before, "every descriptor is given back")

    def test_slow_bytes_end_with_the_handshake_s_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zeromq, "HANDSHAKE_MS", 500)
        pair = Pair.gated().start()
        with Peer(pair.receiver.endpoint) as stranger:
            stranger.heard(10)
            for byte in greeting(b"PLAIN") + framed(4, bytes(250)):
                stranger.say(bytes([byte]))
                if select.select([stranger.socket], [], [], 0.05)[0] and not stranger.socket.recv(4096):
                    break
            else:
                assert stranger.is_hung_up_on()
            assert stranger.num_sent < 64 + 250
        check_a_transfer_works(pair)
        pair.stop()


class TestProofs:
    """A proof that was recorded opens nothing."""

    def test_a_recorded_connection_played_again_is_hung_up_on(self, pair: Pair) -> None:
        port = int(pair.receiver.endpoint.rpartition(":")[2])
        wire = Wire(port)
        try:
            pair.dial(wire.address)
            wait_until(lambda: pair.sender.gauges()["kv_links_up"] == 1, "linked through the relay")
            check_a_transfer_works(pair)
            shown = self._credentials_in(bytes(wire.carried))
        finally:
            wire.close()
        assert shown.username.startswith(pair.sender_settings.incarnation)
        before = pair.receiver.gauges()["kv_not_admitted_total"]
        with Peer(pair.receiver.endpoint) as stranger:
            stranger.greet(b"PLAIN")
            stranger.ask(plain_hello(shown.username, shown.password))
            stranger.endless_message(256 * MIB)
            assert stranger.is_hung_up_on()
            assert stranger.num_sent < 32 * MIB
        assert pair.receiver.gauges()["kv_not_admitted_total"] == before + 1
        assert SECRET.proving not in bytes(wire.carried)
        pair.dial()
        wait_until(lambda: pair.sender.gauges()["kv_links_up"] == 1, "linked again")
        check_a_transfer_works(pair)

    @staticmethod
    def _credentials_in(carried: bytes) -> Credentials:
        """Read user name and password out of what went over the wire."""
        at = carried.index(b"\x05HELLO") + len(b"\x05HELLO")
        username = carried[at + 1 : at + 1 + carried[at]]
        at += 1 + carried[at]
        return Credentials(username, carried[at + 1 : at + 1 + carried[at]])

    def test_who_is_turned_away_is_told_why_and_comes_in_with_a_new_key(self) -> None:
        pair = Pair.gated(SECRET, connect_wait_s=1.0)
        pair.receiver.start()
        pair.sender.start()
        pair.receiver.set_peers(frozenset({pair.sender_settings.incarnation}))
        peer = pair.receiver_settings.incarnation
        pair.sender.set_peers({peer: pair.receiver.endpoint}, {peer: bytes(16)})
        wait_until(lambda: pair.receiver.gauges()["kv_not_admitted_total"] >= 2, "turned away, and dialled again")
        transfer, _ = pair.specs()
        pair.sender.open(transfer)
        failed = pair.sent.wait(SendFailed)
        assert failed.reason == "no_link"
        assert "not admitted" in failed.detail
        pair.dial()
        wait_until(lambda: pair.sender.gauges()["kv_links_up"] == 1, "admitted")
        check_a_transfer_works(pair)
        pair.stop()


class TestImpostors:
    """A listener that took a decode node's address."""

    def test_it_costs_a_prefill_node_no_memory(self) -> None:
        pair, impostor = Pair.gated(SECRET).start(), Impostor()
        try:
            check_a_transfer_works(pair)
            before = resident_mib()
            pair.dial(impostor.address)
            for _ in range(3):
                assert impostor.served.acquire(timeout=60), "hung up on"
            assert impostor.num_sent < 3 * 32 * MIB
            assert resident_mib() - before < FEW_MIB
            pair.dial()
            wait_until(lambda: pair.sender.gauges()["kv_links_up"] == 1, "linked again")
            check_a_transfer_works(pair)
            assert SECRET.proving not in bytes(impostor.heard)
            assert pair.sender.gauges()["kv_strangers_cut_total"] >= 3
        finally:
            pair.stop()
            impostor.close()


CHOSEN_ID = """
import sys
import threading
from pdserve.core.clock import SystemClock
from pdserve.kvtransfer.admission import Admission, credentials
from pdserve.kvtransfer.channel import Arrived, Connected
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.channel_ends import has, polled
from tests.kvtransfer.hostile import Peer, take_id

mine, theirs = b"m" * 16, b"t" * 16
admission = Admission(theirs, None, SystemClock())
listener = ZeroMqChannel(admission=admission)
address = listener.listen("127.0.0.1", 0)

def arrival():
    dialler = ZeroMqChannel()
    route = dialler.connect(address, credentials(admission.key(), None, mine, theirs))
    polled(dialler, listener, until=has(Connected))
    dialler.send(route, b"honest")
    [arrived] = [event for event in polled(listener, dialler, until=has(Arrived)) if isinstance(event, Arrived)]
    dialler.close()
    return arrived.route

first = arrival()
routing_id = first[:1] + (int.from_bytes(first[1:], "big") + 1).to_bytes(4, "big")
with Peer(address) as stranger:
    attack = threading.Thread(target=take_id, args=(stranger, routing_id, sys.argv[1].encode()))
    attack.start()
    while attack.is_alive():
        listener.poll(0.01)
    for _ in range(10):
        listener.poll(0.01)
    assert arrival() == routing_id, "the id was free"
listener.close()
print("alive")
"""


class TestChannel:
    """The channel alone."""

    @pytest.mark.parametrize("how", ["NULL", "PLAIN"])
    def test_a_stranger_that_takes_the_next_routing_id_does_not_abort_the_process(self, how: str) -> None:
        """libzmq 4.3.5 does abort (socket_base.cpp) once the peer is let in: so this runs in a process of its own."""
        child = subprocess.run(
            [sys.executable, "-c", CHOSEN_ID, how], capture_output=True, text=True, timeout=120, check=False
        )
        assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr[-2000:]

    def test_a_route_that_is_not_trusted_may_send_a_greeting_and_no_more(self) -> None:
        listener, dialler = ZeroMqChannel(), ZeroMqChannel()
        route = dialler.connect(listener.listen("127.0.0.1", 0))
        polled(dialler, listener, until=has(Connected))
        dialler.send(route, b"hello")
        [hello] = [event for event in polled(listener, dialler, until=has(Arrived)) if isinstance(event, Arrived)]
        for _ in range(4):
            listener.send(hello.route, bytes(GREETING_BYTES // 2))
        told = polled(dialler, listener, until=has(Lost))
        assert isinstance(told[-1], Lost)
        listener.close()
        dialler.close()

    def test_a_trusted_one_may_send_as_much_as_it_likes(self) -> None:
        listener, dialler = ZeroMqChannel(), ZeroMqChannel()
        route = dialler.connect(listener.listen("127.0.0.1", 0))
        polled(dialler, listener, until=has(Connected))
        dialler.trust(route)
        dialler.send(route, b"hello")
        [hello] = [event for event in polled(listener, dialler, until=has(Arrived)) if isinstance(event, Arrived)]
        for _ in range(40):
            assert listener.send(hello.route, bytes(GREETING_BYTES // 2))
        told = polled(dialler, listener, until=has(Arrived, 40))
        assert not [event for event in told if isinstance(event, Lost)]
        listener.close()
        dialler.close()
