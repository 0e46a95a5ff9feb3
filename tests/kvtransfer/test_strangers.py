"""What strangers cannot do to a receiving service, over TCP."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
import zmq

from pdserve.core.ids import new_incarnation
from pdserve.kvtransfer import Opened, PeerDown, PeerUp, ReceiveFailed, SendFailed
from pdserve.kvtransfer.channel import Route
from pdserve.kvtransfer.codec import encode
from pdserve.kvtransfer.messages import Beat, Commit, Hello, Open
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import FIRST, Pair, check_a_transfer_works


@pytest.fixture
def tcp_pair() -> Iterator[Pair]:
    made = Pair.make(ZeroMqChannel).start()
    yield made
    made.stop()


class TestStrangers:
    """Bytes from anyone else change nothing: no state, no answer that helps, and service goes on."""

    def test_raw_tcp_bytes(self, tcp_pair: Pair) -> None:
        before = tcp_pair.receiver.describe()
        host, port = "127.0.0.1", int(tcp_pair.receiver.endpoint.rpartition(":")[2])
        for content in (b"GET / HTTP/1.1\r\n\r\n" * 50, bytes(4096), b"\xff" * 4096, b"\x01\x00" * 2048, b"PDKV" * 99):
            with socket.create_connection((host, port)) as stranger:
                self._say_and_read(stranger, content)
        check_a_transfer_works(tcp_pair)
        self._check_unchanged(tcp_pair, before)
        gauges = tcp_pair.receiver.gauges()
        assert gauges["kv_bad_frames_total"] == gauges["kv_strange_total"] == 0, "raw bytes became messages"

    @staticmethod
    def _say_and_read(stranger: socket.socket, content: bytes) -> None:
        """Send everything and read to the end, unless the other side hangs up first."""
        stranger.settimeout(30)
        with contextlib.suppress(ConnectionError, OSError):
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass

    @staticmethod
    def _check_unchanged(pair: Pair, before: list[dict[str, object]]) -> None:
        after = pair.receiver.describe()
        assert [machine["link_from"] for machine in after] == [machine["link_from"] for machine in before]
        assert pair.receiver.gauges()["kv_transfers"] == 0
        assert pair.receiver.gauges()["kv_io_errors_total"] == 0
        assert not [event for event in pair.received.all if isinstance(event, PeerDown | ReceiveFailed)]

    def test_messages_of_a_raw_dealer(self, tcp_pair: Pair) -> None:
        before = tcp_pair.receiver.describe()
        mine, theirs = tcp_pair.specs()
        tcp_pair.receiver.expect(theirs)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(tcp_pair.receiver.endpoint)
        opened = encode(Open(mine.transfer_id, 1, bytes(32), 20))
        posed = Hello(new_incarnation(), tcp_pair.receiver_settings.incarnation, bytes(16), None, protocol_version=9)
        messages: list[list[bytes]] = [
            [b""],
            [b"garbage"],
            [b"x"] * 50,
            [bytes(4096)] * 3,
            [opened],
            [opened, b"more"],
            [opened[:-1]],
            [encode(Commit(mine.transfer_id, 1, 0, FIRST))],
            [encode(Beat())],
            [encode(posed)],
        ]
        for message in messages:
            stranger.send_multipart(message)
        # The answer to the last message shows that all of them were read.
        answers = 0
        while answers < 4:
            assert stranger.poll(30_000)
            stranger.recv_multipart()
            answers += 1
        tcp_pair.sender.open(mine)
        tcp_pair.received.wait(Opened)
        tcp_pair.receiver.grant(mine.transfer_id)
        tcp_pair.send_all(mine.transfer_id)
        tcp_pair.closed(mine.transfer_id)
        stranger.close(0)
        context.term()
        gauges = tcp_pair.receiver.gauges()
        assert gauges["kv_bad_frames_total"] == 6
        assert gauges["kv_strange_total"] == 3
        self._check_unchanged(tcp_pair, before)

    def test_a_message_that_is_too_long_ends_its_connection_only(self, tcp_pair: Pair) -> None:
        before = tcp_pair.receiver.describe()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        monitor = stranger.get_monitor_socket(zmq.Event.DISCONNECTED)
        stranger.connect(tcp_pair.receiver.endpoint)
        stranger.send(bytes((1 << 20) + 1))
        assert monitor.poll(30_000), "libzmq drops the connection"
        stranger.disable_monitor()
        monitor.close(0)
        stranger.close(0)
        context.term()
        check_a_transfer_works(tcp_pair)
        self._check_unchanged(tcp_pair, before)

    def test_a_damaged_frame_on_a_link_ends_its_transfers_and_the_link_comes_back(self, tcp_pair: Pair) -> None:
        transfer_id = tcp_pair.open()
        with tcp_pair.sender._loop.lock:
            route: Route = next(iter(tcp_pair.sender._shell.table._by_route))
        tcp_pair.sender._loop.submit(lambda now_s: self._damage(tcp_pair, route))
        tcp_pair.closed(transfer_id)
        assert tcp_pair.received.wait(ReceiveFailed).reason == "kv_nack_frame"
        assert tcp_pair.sent.wait(SendFailed).reason == "kv_nack_frame"
        tcp_pair.sent.wait(PeerUp, num=2)
        tcp_pair.received.wait(PeerUp, num=2)
        check_a_transfer_works(tcp_pair)

    @staticmethod
    def _damage(pair: Pair, route: Route) -> None:
        frame = bytearray(encode(Beat()))
        frame[6] ^= 1
        assert pair.sender._shell._channel.send(route, bytes(frame))
