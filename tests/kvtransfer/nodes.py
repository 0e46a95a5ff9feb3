"""Small real ends of the corridor for tests: a pool made of bytes, services with recorded events, waits with deadlines."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pdserve.core.clock import SystemClock
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.identity import Capabilities, Identity
from pdserve.core.ids import Incarnation, TransferId, new_incarnation, new_transfer_id
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.work import SampledToken
from pdserve.kvtransfer import (
    KvReceiveService,
    KvSendService,
    LinkSettings,
    Opened,
    PeerUp,
    ReceiveClosed,
    SendClosed,
    TransferSpec,
)
from pdserve.kvtransfer.admission import Admission
from pdserve.kvtransfer.channel import Channel
from pdserve.kvtransfer.zeromq import ZeroMqChannel

WAIT_S = 30.0
LAYOUT = KvLayout((LayerLayout(2, 8, 8), LayerLayout(2, 8, 4), LayerLayout(1, 16, 16), LayerLayout(2, 8, 8)), "float32")
IDENTITY = Identity("digest", "TestForCausalLM", {"head_dim": "8", "num_layers": "4"}, "tokenizer")
CAPABILITIES = Capabilities("float32", "float32", ("float32",))
FIRST = (SampledToken(0, 42, -0.25),)
E = TypeVar("E")


def settings(layout: KvLayout = LAYOUT, **changes: object) -> LinkSettings:
    """Settings of one node; `changes` replaces fields."""
    base = LinkSettings(identity=IDENTITY, capabilities=CAPABILITIES, layout=layout, incarnation=new_incarnation())
    return replace(base, **changes)  # type: ignore[arg-type]  # fields by name


def spec_for(peer: Incarnation, num_tokens: int = 20, arrived_s: float = 0.0) -> TransferSpec:
    """A transfer with the node `peer`."""
    return TransferSpec(new_transfer_id(), 1, peer, bytes(32), num_tokens, arrived_s)


def kv_bytes(transfer_id: TransferId, layer: int, token: int, layout: KvLayout) -> bytes:
    """The content that a test pool holds for one token of one layer: different everywhere."""
    seed = hashlib.sha256(transfer_id + bytes([layer]) + token.to_bytes(4, "little")).digest()
    num = layout.layer_token_bytes(layer)
    return (seed * (num // len(seed) + 1))[:num]


class BytesSource:
    """A pool that makes up its content. The wire form here is token by token, which only its own sink must understand."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.packed: list[tuple[TransferId, range, range]] = []
        self.fails = False

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        if self.fails:
            raise OSError("the pool is broken")
        self.packed.append((transfer_id, layers, tokens))
        content = b"".join(kv_bytes(transfer_id, layer, token, self.layout) for layer in layers for token in tokens)
        assert len(into) == len(content)
        into[:] = content


class BytesSink:
    """A pool that remembers what was placed."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.placed: dict[TransferId, dict[tuple[int, int], bytes]] = {}
        self.fails = False

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        if self.fails:
            raise OSError("the pool is broken")
        cells = self.placed.setdefault(transfer_id, {})
        at = 0
        for layer in layers:
            num = self.layout.layer_token_bytes(layer)
            for token in tokens:
                cells[layer, token] = bytes(payload[at : at + num])
                at += num

    def check(self, transfer_id: TransferId, num_tokens: int) -> None:
        """Every layer and token holds what the source made up."""
        cells = self.placed[transfer_id]
        for layer in range(self.layout.num_layers):
            for token in range(num_tokens):
                assert cells[layer, token] == kv_bytes(transfer_id, layer, token, self.layout), (layer, token)


class Events:
    """Events in order, with waits that have a deadline."""

    def __init__(self) -> None:
        self.all: list[object] = []
        self._changed = threading.Condition()

    def __call__(self, event: object) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def wait(self, kind: type[E], matching: Callable[[E], bool] = lambda _: True, num: int = 1) -> E:
        """Wait for the `num`-th event of `kind` that matches."""

        def found() -> list[E]:
            return [event for event in self.all if isinstance(event, kind) and matching(event)]

        with self._changed:
            if not self._changed.wait_for(lambda: len(found()) >= num, WAIT_S):
                raise AssertionError(f"no {kind.__name__} within {WAIT_S} s; came: {self.all}")
            return found()[num - 1]

    def of(self, transfer_id: TransferId) -> list[object]:
        """All events of one transfer."""
        return [event for event in self.all if getattr(event, "transfer_id", None) == transfer_id]

    def kinds(self, transfer_id: TransferId) -> list[str]:
        """Names of all events of one transfer."""
        return [type(event).__name__ for event in self.of(transfer_id)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that no event announces."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}"
        time.sleep(0.002)


@dataclass
class Pair:
    """A prefill node's and a decode node's end, connected."""

    sender: KvSendService
    receiver: KvReceiveService
    sender_settings: LinkSettings
    receiver_settings: LinkSettings
    source: BytesSource
    sink: BytesSink
    sent: Events = field(default_factory=Events)
    received: Events = field(default_factory=Events)
    admission: Admission | None = None

    @classmethod
    def gated(cls, secret: ClusterSecret | None = None, **changes: Any) -> "Pair":
        """Make both ends over ZeroMQ, the receiver's as a decode node's: it lets in only who is admitted."""
        mine, theirs = settings(secret=secret, **changes), settings(secret=secret, **changes)
        admission = Admission(theirs.incarnation, secret, SystemClock())
        pair = cls.make(partial(ZeroMqChannel, admission=admission), mine, theirs)
        pair.admission = admission
        return pair

    @classmethod
    def make(
        cls,
        make_channel: Callable[[], Channel],
        sender_settings: LinkSettings | None = None,
        receiver_settings: LinkSettings | None = None,
    ) -> "Pair":
        """Make both ends without starting them."""
        mine, theirs = sender_settings or settings(), receiver_settings or settings()
        source, sink = BytesSource(mine.layout), BytesSink(theirs.layout)
        sent, received = Events(), Events()
        return cls(
            KvSendService(mine, source, sent, make_channel=make_channel),
            KvReceiveService(theirs, sink, received, make_channel=make_channel),
            mine,
            theirs,
            source,
            sink,
            sent,
            received,
        )

    def start(self, meet: bool = True) -> "Pair":
        """Start both ends and, unless told otherwise, let them meet."""
        self.receiver.start()
        self.sender.start()
        if meet:
            self.receiver.set_peers(frozenset({self.sender_settings.incarnation}))
            self.dial()
            self.sent.wait(PeerUp)
            self.received.wait(PeerUp)
        return self

    def dial(self, address: str = "") -> None:
        """Tell the sender where the receiver is, or (`address`) seems to be."""
        peer = self.receiver_settings.incarnation
        keys = {} if self.admission is None else {peer: self.admission.key()}
        self.sender.set_peers({peer: address or self.receiver.endpoint}, keys)

    def specs(self, num_tokens: int = 20) -> tuple[TransferSpec, TransferSpec]:
        """One transfer as both nodes' submits describe it."""
        mine = spec_for(self.receiver_settings.incarnation, num_tokens)
        return mine, replace(mine, peer=self.sender_settings.incarnation)

    def open(self, num_tokens: int = 20) -> TransferId:
        """Expect, open and grant a transfer."""
        mine, theirs = self.specs(num_tokens)
        self.receiver.expect(theirs)
        self.sender.open(mine)
        self.received.wait(Opened, lambda event: event.transfer_id == mine.transfer_id)
        self.receiver.grant(mine.transfer_id)
        return mine.transfer_id

    def send_all(self, transfer_id: TransferId, num_tokens: int = 20) -> None:
        """Mark every layer ready and commit."""
        for layer in range(self.source.layout.num_layers):
            self.sender.mark_ready(transfer_id, range(layer, layer + 1), range(num_tokens))
        self.sender.commit(transfer_id, FIRST, {"prefill.compute": 0.5})

    def closed(self, transfer_id: TransferId) -> None:
        """Wait for the last event on both sides, and check that it is the last and comes once."""
        self.sent.wait(SendClosed, lambda event: event.transfer_id == transfer_id)
        self.received.wait(ReceiveClosed, lambda event: event.transfer_id == transfer_id)
        for kinds, last in (
            (self.sent.kinds(transfer_id), "SendClosed"),
            (self.received.kinds(transfer_id), "ReceiveClosed"),
        ):
            assert kinds[-1] == last
            assert kinds.count(last) == 1

    def check_idle(self) -> None:
        """The leak oracle: both ends hold nothing but their links."""
        for service in (self.sender, self.receiver):
            service.check_invariants()
        zero = ("kv_transfers", "kv_frames_in_sockets", "kv_staging_bytes", "kv_parked_opens", "kv_io_errors_total")

        def left() -> dict[str, float]:
            both = list(self.sender.gauges().items()) + list(self.receiver.gauges().items())
            return {name: value for name, value in both if name in zero and value}

        wait_until(lambda: not left(), f"gauges back to zero: {left()}")

    def stop(self) -> None:
        """Stop both ends, and check that nothing is left."""
        self.check_idle()
        assert self.sender.stop()
        assert self.receiver.stop()
        for service in (self.sender, self.receiver):
            service.check_invariants()
            gauges = service.gauges()
            assert {name: value for name, value in gauges.items() if value and not name.endswith("_total")} == {}


def check_a_transfer_works(pair: Pair) -> None:
    """One transfer from submit to adoption."""
    transfer_id = pair.open()
    pair.send_all(transfer_id)
    pair.closed(transfer_id)
    assert pair.sent.kinds(transfer_id) == ["Granted", "Acked", "SendClosed"]
    assert pair.received.kinds(transfer_id) == ["Opened", "Received", "ReceiveClosed"]
    pair.sink.check(transfer_id, 20)
