"""Delta: what the decode node holds already does not travel. Whole services, with a prefix cache as a node would keep it."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from pdserve.core.clock import SystemClock
from pdserve.core.ids import TransferId
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.work import prompt_digest
from pdserve.kvtransfer import Acked, Granted, Opened, Received, ReceiveFailed, SendFailed
from pdserve.kvtransfer.channel import Channel
from pdserve.kvtransfer.inprocess import InProcessNetwork
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.nixl_engine import NixlAgent
from pdserve.kvtransfer.shared_channel import SharedMemoryChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.kvtransfer.nixl_ends import NEEDS_NIXL
from tests.kvtransfer.nodes import FIRST, LAYOUT, Pair, settings, spec_for

WINDOWED = KvLayout((LayerLayout(2, 8, 8), LayerLayout(2, 8, 8, window=6), LayerLayout(1, 16, 4)), "float32")
Cells = dict[tuple[int, int], bytes]


def kv_of(ids: tuple[int, ...], layer: int, token: int, layout: KvLayout) -> bytes:
    """KV of one position of a prompt: it depends on all tokens up to that one, as real KV does."""
    seed = hashlib.sha256(repr((ids[: token + 1], layer)).encode()).digest()
    num = layout.layer_token_bytes(layer)
    return (seed * (num // len(seed) + 1))[:num]


@dataclass
class Prompts:
    """Both pools: the prefill node computes what is asked for, the decode node keeps adopted prompts in a cache."""

    layout: KvLayout
    ids_of: dict[TransferId, tuple[int, ...]] = field(default_factory=dict)
    packed: list[tuple[TransferId, range, range]] = field(default_factory=list)
    pool: dict[TransferId, Cells] = field(default_factory=dict)
    cache: dict[tuple[int, ...], Cells] = field(default_factory=dict)

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        """The prefill node's pool."""
        self.packed.append((transfer_id, layers, tokens))
        ids = self.ids_of[transfer_id]
        into[:] = b"".join(kv_of(ids, layer, token, self.layout) for layer in layers for token in tokens)

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        """The decode node's pool."""
        at = 0
        for layer in layers:
            num = self.layout.layer_token_bytes(layer)
            for token in tokens:
                self.pool.setdefault(transfer_id, {})[layer, token] = bytes(payload[at : at + num])
                at += num

    def pin(self, transfer_id: TransferId) -> int:
        """Take over the longest cached beginning of this prompt, token ids compared; return its length."""
        ids, longest, held = self.ids_of[transfer_id], 0, Cells()
        for cached, cells in self.cache.items():
            same = next(
                (n for n, (a, b) in enumerate(zip(ids, cached, strict=False)) if a != b), min(len(ids), len(cached))
            )
            if same > longest:
                longest, held = same, cells
        self.pool[transfer_id] = {place: kv for place, kv in held.items() if place[1] < longest}
        return longest

    def adopt(self, transfer_id: TransferId) -> None:
        """Publish a prompt that was received whole: every position that a later token can see is right."""
        ids = self.ids_of[transfer_id]
        cells = self.pool[transfer_id]
        for layer, shape in enumerate(self.layout.layers):
            for token in range(shape.first_needed_token(len(ids)), len(ids)):
                assert cells[layer, token] == kv_of(ids, layer, token, self.layout), (layer, token)
        self.cache[ids] = cells


class Delta:
    """Two nodes, and prompts that go from one to the other."""

    def __init__(self, make_channel: Callable[[], Channel], layout: KvLayout = LAYOUT) -> None:
        self.prompts = Prompts(layout)
        self.pair = Pair.make(make_channel, settings(layout), settings(layout))
        for service, name in ((self.pair.sender, "_source"), (self.pair.receiver, "_sink")):
            setattr(service._shell, name, self.prompts)
        self.pair.start()

    def open(self, ids: tuple[int, ...]) -> TransferId:
        """Announce a prompt; OPEN has come."""
        mine = replace(spec_for(self.pair.receiver_settings.incarnation, len(ids)), prompt_digest=prompt_digest(ids))
        self.prompts.ids_of[mine.transfer_id] = ids
        self.pair.receiver.expect(replace(mine, peer=self.pair.sender_settings.incarnation))
        self.pair.sender.open(mine)
        self.pair.received.wait(Opened, lambda event: event.transfer_id == mine.transfer_id)
        return mine.transfer_id

    def send(self, ids: tuple[int, ...], chunk: int = 7) -> tuple[int, Acked, Received]:
        """Move a prompt, of which some is ready before the grant; return how much was held, and both ends' last word."""
        transfer_id = self.open(ids)
        chunks = [range(start, min(start + chunk, len(ids))) for start in range(0, len(ids), chunk)]
        layers = [range(layer, layer + 1) for layer in range(self.prompts.layout.num_layers)]
        for each in layers:
            self.pair.sender.mark_ready(transfer_id, each, chunks[0])
        held = self.prompts.pin(transfer_id)
        self.pair.receiver.grant(transfer_id, held)
        for tokens in chunks[1:]:
            for each in layers:
                self.pair.sender.mark_ready(transfer_id, each, tokens)
        self.pair.sender.commit(transfer_id, FIRST, {})
        acked = self.pair.sent.wait(Acked, lambda event: event.transfer_id == transfer_id)
        received = self.pair.received.wait(Received, lambda event: event.transfer_id == transfer_id)
        granted = self.pair.sent.wait(Granted, lambda event: event.transfer_id == transfer_id)
        assert granted.skip_tokens == held
        self.pair.closed(transfer_id)
        self.prompts.adopt(transfer_id)
        return held, acked, received

    def token_bytes(self, num_tokens: int) -> int:
        return self.prompts.layout.token_bytes * num_tokens


@pytest.fixture(params=["inprocess", "zeromq", "shared", pytest.param("nixl", marks=NEEDS_NIXL)])
def delta(request: pytest.FixtureRequest) -> Iterator[Delta]:
    network = InProcessNetwork()
    make: dict[str, Callable[[], Channel]] = {
        "inprocess": network.channel,
        "zeromq": ZeroMqChannel,
        "shared": lambda: SharedMemoryChannel(ZeroMqChannel(), SystemClock()),
        "nixl": lambda: NixlChannel(ZeroMqChannel(), NixlAgent(), SystemClock()),
    }
    both = Delta(make[request.param])
    yield both
    both.pair.stop()


def test_only_the_rest_travels(delta: Delta) -> None:
    first, second = tuple(range(100, 120)), (*range(100, 112), 7, 8, 9)
    held, acked, received = delta.send(first)
    assert (held, acked.stats.kv_bytes, received.stats.kv_bytes) == (0, delta.token_bytes(20), delta.token_bytes(20))
    del delta.prompts.packed[:]
    held, acked, received = delta.send(second)
    assert (held, acked.stats.kv_bytes, received.stats.kv_bytes) == (12, delta.token_bytes(3), delta.token_bytes(3))
    assert min(tokens.start for _, _, tokens in delta.prompts.packed) == 12, "skipped tokens were packed"


def test_a_prompt_that_is_held_whole_moves_only_its_first_token(delta: Delta) -> None:
    ids = tuple(range(16))
    delta.send(ids)
    held, acked, received = delta.send(ids)
    assert (held, acked.stats.kv_bytes, acked.stats.num_frames) == (16, 0, 0)
    assert received.tokens == FIRST


def test_a_conversation_moves_each_turn_once(delta: Delta) -> None:
    ids: tuple[int, ...] = ()
    for turn in range(1, 6):
        before = len(ids)
        ids = (*ids, *range(1000 * turn, 1000 * turn + 5 * turn))
        held, acked, _ = delta.send(ids)
        assert (held, acked.stats.kv_bytes) == (before, delta.token_bytes(5 * turn))


def test_window_layers_with_a_held_beginning() -> None:
    both = Delta(InProcessNetwork().channel, WINDOWED)
    both.send(tuple(range(20)))
    held, acked, _ = both.send((*range(20), *range(50, 60)))
    assert (held, acked.stats.kv_bytes) == (20, both.token_bytes(10))
    both.pair.stop()


def test_adoption_wants_everything_from_the_held_beginning_on() -> None:
    """What is held excuses nothing behind it: one missing position, and the name of it comes back."""
    both = Delta(InProcessNetwork().channel)
    both.send(tuple(range(20)))
    transfer_id = both.open((*range(12), *range(70, 78)))
    both.pair.receiver.grant(transfer_id, both.prompts.pin(transfer_id))
    both.pair.sender.mark_ready(transfer_id, range(4), range(13, 20))
    both.pair.sender.commit(transfer_id, FIRST, {})
    failed = both.pair.received.wait(ReceiveFailed, lambda event: event.transfer_id == transfer_id)
    assert (failed.reason, failed.detail) == ("kv_nack_incomplete", "layer 0 lacks tokens [12, 13)")
    both.pair.closed(transfer_id)
    both.pair.stop()


def test_a_claim_to_hold_more_than_there_is_ends_the_transfer_by_name() -> None:
    both = Delta(InProcessNetwork().channel)
    transfer_id = both.open(tuple(range(20)))
    both.pair.receiver.grant(transfer_id, 21)
    failed = both.pair.sent.wait(SendFailed)
    assert (failed.reason, failed.detail) == ("bad_grant", "21 tokens to skip of 20")
    both.pair.closed(transfer_id)
    both.pair.stop()
