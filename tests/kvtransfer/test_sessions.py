"""Whole sessions of both services over a link that drops, repeats, delays, reorders, cuts, damages, stalls and breaks.

Failure classes 1 to 5, 15, 23: whatever the link does, both sides end by name within their deadlines, nothing is adopted that was
not sent, no pool is touched that was taken back, every buffer and block comes back, and the next transfer works.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pdserve.core.ids import TransferId
from pdserve.core.link_faults import FaultKind, LinkFaults
from pdserve.core.link_shape import LinkShape
from pdserve.kvtransfer.events import Acked, Received, SendFailed
from tests.kvtransfer.stepped import NUM_TOKENS, SteppedPair

LONGEST_S = 60.0
"""Longer than any deadline chain of `SteppedPair`."""
RECONNECT_S = 10.0
"""A handshake whose answer was lost is given up after a lease and `park_s`; then a pause, and the next one."""
NONE = LinkFaults()


def faults() -> st.SearchStrategy[LinkFaults]:
    """Any mix of faults."""
    rate = st.tuples(st.sampled_from(FaultKind), st.sampled_from([0.02, 0.1, 0.2]))
    at = st.tuples(st.sampled_from(FaultKind), st.integers(1, 40))
    return st.builds(
        LinkFaults,
        rates=st.lists(rate, max_size=4).map(tuple),
        at=st.lists(at, max_size=3).map(tuple),
        seed=st.integers(0, 999),
        hold_s=st.sampled_from([0.001, 0.5]),
        pause_s=st.sampled_from([0.1, 2.0, 5.0]),
    )


SHAPES = st.sampled_from([None, LinkShape(1e6, 0.005, 0.002), LinkShape(1e8, 0.2)])


def ends_well(pair: SteppedPair) -> None:
    """The link is mended: everything ends, nothing is left, and one more transfer works."""
    pair.end_faults()
    pair.will_grant = lambda _: True
    pair.end(LONGEST_S)
    pair.check()
    pair.reconnect(RECONNECT_S)
    transfer_id = pair.whole()
    pair.end(LONGEST_S)
    assert any(isinstance(event, Acked) and event.transfer_id == transfer_id for event in pair.sent), pair.sent[-3:]
    pair.check()


@hypothesis_settings(max_examples=120, deadline=None)
@given(faults(), faults(), SHAPES, st.integers(1, 4))
def test_transfers_over_a_bad_link(out: LinkFaults, back: LinkFaults, shape: LinkShape | None, number: int) -> None:
    pair = SteppedPair(out, back, shape)
    for _ in range(number):
        pair.whole()
        pair.advance(0.3)
    pair.advance(5.0)
    ends_well(pair)


@hypothesis_settings(max_examples=120, deadline=None)
@given(st.data(), faults(), faults(), SHAPES)
def test_nodes_do_anything_over_a_bad_link(
    data: st.DataObject, out: LinkFaults, back: LinkFaults, shape: LinkShape | None
) -> None:
    pair = SteppedPair(out, back, shape)
    pair.will_grant = lambda _: data.draw(st.booleans(), label="grant")
    live: list[TransferId] = []
    actions: list[Callable[[TransferId], object]] = [
        lambda _: live.append(pair.start()),
        lambda each: pair.produce(each, range(NUM_TOKENS // 2)),
        lambda each: pair.produce(each, range(NUM_TOKENS // 2, NUM_TOKENS)),
        pair.commit,
        lambda each: pair.sender.table.abort(each, "stop", False, pair.now_s),
        lambda each: pair.sender.table.abort(each, "end", True, pair.now_s),
        lambda each: pair.receiver.table.refuse(each, "BUSY", pair.now_s),
        lambda each: pair.receiver.table.cancel(each, "gone", pair.now_s),
        lambda _: pair.advance(0.1),
        lambda _: pair.advance(3.0),
    ]
    live.append(pair.start())
    for _ in range(data.draw(st.integers(1, 20), label="actions")):
        act = data.draw(st.sampled_from(range(len(actions))), label="action")
        actions[act](data.draw(st.sampled_from(live), label="transfer"))
        pair.settle()
    ends_well(pair)


@pytest.mark.parametrize("side", ["out", "back"])
@pytest.mark.parametrize("kind", FaultKind)
def test_the_kth_frame_of_every_kind_meets_every_fault(kind: FaultKind, side: str) -> None:
    """Failure class 4, for every k of a whole session, its handshake included."""
    met = 0
    for k in range(1, 40):
        fault = LinkFaults(at=((kind, k),), hold_s=1.0, pause_s=4.0)
        pair = SteppedPair(*((fault, NONE) if side == "out" else (NONE, fault)))
        pair.whole()
        pair.advance(2.0)
        met += pair.channels[side == "back"].num_injected[kind]
        ends_well(pair)
        if pair.channels[side == "back"].num_injected[kind] == 0:
            break
    assert met >= 3, "too few frames to prove anything"


def test_a_clean_link_always_succeeds() -> None:
    """The checks above would pass if nothing ever worked."""
    pair = SteppedPair(NONE, NONE, LinkShape(1e7, 0.01))
    ids = [pair.whole() for _ in range(5)]
    pair.end(LONGEST_S)
    assert [event.transfer_id for event in pair.received if isinstance(event, Received)] == ids
    ends_well(pair)


def test_failures_are_counted_and_a_full_node_is_none() -> None:
    """Failure class 27: what goes wrong with transfers shows, also where a retry hides it from clients."""
    # The sender's frames: HELLO, two OPENs, DATA.
    pair = SteppedPair(LinkFaults(at=((FaultKind.CORRUPT, 4),)), NONE)
    pair.will_grant = lambda _: False
    refused = pair.start()
    pair.settle()
    pair.receiver.table.refuse(refused, "BUSY", pair.now_s)
    pair.settle()
    pair.will_grant = lambda _: True
    pair.whole()
    pair.end(LONGEST_S)
    failures = [event for event in pair.sent if isinstance(event, SendFailed)]
    assert [(event.reason, event.busy) for event in failures] == [("kv_nack_busy", True), ("kv_nack_checksum", False)]
    assert [shell.herald.gauges["kv_failed_total"] for shell in pair.shells] == [1, 1]
    ends_well(pair)


def test_one_warm_prompt_again_and_again() -> None:
    """Failure class 15: staging and blocks come back each time, with a skipped prefix too."""
    pair = SteppedPair(NONE, NONE)
    pair.will_grant = lambda _: False
    for _ in range(40):
        transfer_id = pair.start()
        pair.settle()
        pair.sink.bound.add(transfer_id)
        pair.receiver.table.grant(transfer_id, 16, pair.now_s)
        pair.produce(transfer_id, range(NUM_TOKENS))
        pair.commit(transfer_id)
        for layer in range(pair.mine.layout.num_layers):
            cells = pair.sink.placed.setdefault(transfer_id, {})
            cells.update({(layer, token): b"held before" for token in range(16)})
        pair.sink.check = lambda *_: None  # type: ignore[method-assign]  # the first tokens were here before
        pair.advance(0.5)
        assert isinstance(pair.received[-2], Received)
        pair.check()


def test_the_checks_look_at_bytes() -> None:
    """A planted fault: the decode node's pool holds another byte than was sent."""
    pair = SteppedPair(NONE, NONE)
    pair.will_grant = lambda _: False
    transfer_id = pair.whole()
    pair.settle()
    pair.sink.bound.add(transfer_id)
    pair.sink.placed[transfer_id] = {}
    pair.receiver.table.grant(transfer_id, 1, pair.now_s)
    pair.settle()
    with pytest.raises(AssertionError, match="bytes that were not sent"):
        pair.check()


def test_the_checks_notice_a_late_write() -> None:
    """A planted fault: the node frees blocks while bytes may still come (failure class 1)."""
    pair = SteppedPair(NONE, NONE)
    transfer_id = pair.start()
    pair.settle()
    pair.produce(transfer_id, range(NUM_TOKENS // 2))
    pair.settle()
    pair.sink.free(transfer_id)
    pair.produce(transfer_id, range(NUM_TOKENS // 2, NUM_TOKENS))
    pair.settle()
    with pytest.raises(AssertionError):
        pair.check()
