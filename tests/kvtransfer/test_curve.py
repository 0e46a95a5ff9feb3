"""Encrypted KV links: nothing readable on the wire, no link without the same keys and the same choice, a reason that helps."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.core.cluster_secret import ClusterSecret
from pdserve.kvtransfer import PeerUp, SendFailed
from pdserve.kvtransfer.curve import CurveKeys, listener_keys
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nodes import Pair, check_a_transfer_works, kv_bytes, settings
from tests.kvtransfer.relay import Wire

SECRET = b"a cluster secret of the test"
KEYS = listener_keys(SECRET)


@contextmanager
def over_a_wire(mine: CurveKeys | None, theirs: CurveKeys | None) -> Iterator[tuple[Pair, Wire]]:
    """Two ends with keys of their own, over a relay that sees all bytes."""
    channels = iter((ZeroMqChannel(theirs), ZeroMqChannel(mine)))  # the receiver starts first
    pair = Pair.make(lambda: next(channels), settings(connect_wait_s=1.0)).start(meet=False)
    wire = Wire(int(pair.receiver.endpoint.rpartition(":")[2]))
    pair.receiver.set_peers(frozenset({pair.sender_settings.incarnation}))
    pair.sender.set_peers({pair.receiver_settings.incarnation: wire.address})
    yield pair, wire
    pair.stop()
    wire.close()


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "curve"])
def test_what_the_network_can_read(keys: CurveKeys | None) -> None:
    with over_a_wire(keys, keys) as (pair, wire):
        pair.sent.wait(PeerUp)
        transfer_id = pair.open()
        pair.send_all(transfer_id)
        pair.closed(transfer_id)
        pair.sink.check(transfer_id, 20)
        content = kv_bytes(transfer_id, 0, 3, pair.source.layout)
        assert (content in wire.carried) is (keys is None)
        assert (b"PDKV" in wire.carried) is (keys is None)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(KEYS, None), (None, KEYS), (KEYS, listener_keys(b"another secret")), (listener_keys(b"another secret"), KEYS)],
    ids=["only the prefill node", "only the decode node", "another secret there", "another secret here"],
)
def test_ends_that_differ_never_meet(mine: CurveKeys | None, theirs: CurveKeys | None) -> None:
    with over_a_wire(mine, theirs) as (pair, _):
        spec, _ = pair.specs()
        pair.sender.open(spec)
        failed = pair.sent.wait(SendFailed)
        assert failed.reason == "no_link"
        assert "no ZeroMQ handshake" in failed.detail or "disconnected" in failed.detail, failed.detail
        assert not [event for event in pair.received.all if isinstance(event, PeerUp)]
        assert pair.receiver.gauges()["kv_strange_total"] == 0, "nothing became a message"


def test_the_same_secret_gives_the_same_keys_on_every_node() -> None:
    assert listener_keys(SECRET) == KEYS
    assert listener_keys(SECRET + b"x").public != KEYS.public
    assert KEYS.secret.decode() not in repr(KEYS)
    assert KEYS.public == b"b6hd6VC7UyUt0MS)Id=l9&mJ}OROE5Bv<OwV4xv%", (
        "every node of every version must come to this key"
    )


def test_an_encrypted_pair_with_a_secret_works() -> None:
    pair = Pair.make(lambda: ZeroMqChannel(KEYS), *(settings(secret=ClusterSecret(SECRET)) for _ in range(2))).start()
    check_a_transfer_works(pair)
    pair.stop()
