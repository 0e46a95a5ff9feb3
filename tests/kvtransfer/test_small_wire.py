"""KV in 8 bits between two ends: agreed upon by name, counted by what travels."""

from dataclasses import replace

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.kvtransfer import Acked, LinkSettings, PeerRefused, Received
from pdserve.kvtransfer.inprocess import InProcessNetwork
from tests.kvtransfer.nodes import CAPABILITIES, FIRST, LAYOUT, BytesSink, BytesSource, Pair, settings, wait_until

SMALL = LAYOUT.on_wire("int8")


def end(wire_dtype: str, *takes: str) -> LinkSettings:
    return settings(wire_dtype=wire_dtype, capabilities=replace(CAPABILITIES, wire_dtypes=takes))


def pair_of(sender: LinkSettings, receiver: LinkSettings, travels: KvLayout) -> Pair:
    """Two ends whose test pools speak what travels."""
    pair = Pair.make(InProcessNetwork().channel, sender, receiver)
    pair.source.layout = pair.sink.layout = travels
    assert isinstance(pair.source, BytesSource)
    assert isinstance(pair.sink, BytesSink)
    return pair


@pytest.mark.parametrize("wire_dtype", ["int8", "float8_e4m3"])
def test_only_the_small_form_travels(wire_dtype: str) -> None:
    small = LAYOUT.on_wire(wire_dtype)
    pair = pair_of(end(wire_dtype, wire_dtype), end(wire_dtype, "float32", wire_dtype), small).start()
    transfer_id = pair.open(20)
    pair.send_all(transfer_id, 20)
    acked, received = pair.sent.wait(Acked), pair.received.wait(Received)
    assert acked.stats.kv_bytes == received.stats.kv_bytes == 20 * small.token_bytes
    assert 20 * small.token_bytes < 20 * LAYOUT.token_bytes / 2
    pair.sink.check(transfer_id, 20)
    pair.stop()


def test_a_decode_node_that_takes_the_small_form_takes_the_plain_one_too() -> None:
    pair = pair_of(settings(), end("int8", "float32", "int8"), LAYOUT).start()
    transfer_id = pair.open(20)
    pair.send_all(transfer_id, 20)
    assert pair.sent.wait(Acked).stats.kv_bytes == 20 * LAYOUT.token_bytes
    pair.sink.check(transfer_id, 20)
    pair.stop()


@pytest.mark.parametrize("takes", [("", "float32"), ("float8_e4m3", "float32", "float8_e4m3")])
def test_a_decode_node_that_does_not_take_it_is_named(takes: tuple[str, ...]) -> None:
    pair = pair_of(end("int8", "int8"), end(*takes), SMALL).start(meet=False)
    pair.receiver.set_peers(frozenset({pair.sender_settings.incarnation}))
    pair.dial()
    assert pair.sent.wait(PeerRefused).fields == ("wire_dtypes",)
    assert pair.received.wait(PeerRefused).fields == ("wire_dtypes",)
    wait_until(lambda: not pair.receiver.gauges()["kv_links"], "the link is gone")
    pair.sender.stop()
    pair.receiver.stop()


def test_what_was_not_agreed_upon_is_not_taken() -> None:
    """A sender that says one thing and sends another."""
    liar = end("int8", "float32")
    pair = pair_of(liar, settings(), SMALL).start()
    transfer_id = pair.open(20)
    pair.sender.mark_ready(transfer_id, range(4), range(20))
    pair.sender.commit(transfer_id, FIRST, {})
    pair.closed(transfer_id)
    assert "kv_nack_layout" in str(pair.received.of(transfer_id))
    pair.stop()


def test_a_wire_dtype_that_makes_nothing_smaller_is_refused_at_start() -> None:
    """The two forms are told apart by their sizes."""
    with pytest.raises(ConfigError, match="no smaller"):
        settings(KvLayout((LayerLayout(1, 4, 4),), "bfloat16"), wire_dtype="int8")
    with pytest.raises(ConfigError, match="none of"):
        settings(wire_dtype="int4")
