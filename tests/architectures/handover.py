"""The corridor between two engines in one process: the real frames, codec, services and both transfer machines."""

import queue
from collections.abc import Sequence
from types import TracebackType

from pdserve.core.ids import Incarnation, TransferId, new_incarnation, new_transfer_id
from pdserve.core.work import SampledToken, prompt_digest
from pdserve.engine.blocks import BlockLease
from pdserve.engine.engine import Engine
from pdserve.kvtransfer import (
    KvReceiveService,
    KvSendService,
    LinkSettings,
    Opened,
    ReceiveClosed,
    Received,
    ReceiveEvent,
    SendClosed,
    SendEvent,
    TransferSpec,
)
from pdserve.kvtransfer.inprocess import InProcessNetwork

WAIT_S = 30.0


class PoolOf:
    """An engine's pool as the corridor sees it, on either side: transfers and the blocks they lie in."""

    def __init__(self, engine: Engine, leases: dict[TransferId, BlockLease]) -> None:
        self._engine = engine
        self._leases = leases

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        with self._leases[transfer_id].hold() as block_ids:
            self._engine.pack(layers, block_ids, tokens, into)

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        with self._leases[transfer_id].hold() as block_ids:
            self._engine.unpack(layers, block_ids, tokens, payload)


class Corridor:
    """One transfer per prompt from the prefill engine to the decode engine; usable as a context manager."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        prefill: tuple[Engine, Sequence[BlockLease]],
        decode: tuple[Engine, Sequence[BlockLease]],
    ) -> None:
        self.transfer_ids = [new_transfer_id() for _ in prompts]
        self._prompts = prompts
        self._events: queue.Queue[SendEvent | ReceiveEvent] = queue.Queue()
        network = InProcessNetwork()
        here, there = new_incarnation(), new_incarnation()
        self._receiver = KvReceiveService(
            _settings(decode[0], there),
            PoolOf(decode[0], dict(zip(self.transfer_ids, decode[1], strict=True))),
            self._on_receive,
            make_channel=network.channel,
        )
        self._sender = KvSendService(
            _settings(prefill[0], here),
            PoolOf(prefill[0], dict(zip(self.transfer_ids, prefill[1], strict=True))),
            self._events.put,
            make_channel=network.channel,
        )
        self._here, self._there = here, there

    def __enter__(self) -> "Corridor":
        """Connect, and open every transfer."""
        self._receiver.start()
        self._receiver.set_peers(frozenset({self._here}))
        self._sender.start()
        self._sender.set_peers({self._there: self._receiver.endpoint})
        for transfer_id, prompt in zip(self.transfer_ids, self._prompts, strict=True):
            digest = prompt_digest(prompt)
            self._receiver.expect(TransferSpec(transfer_id, 1, self._here, digest, len(prompt), 0.0))
            self._sender.open(TransferSpec(transfer_id, 1, self._there, digest, len(prompt), 0.0))
        return self

    def computed(self, number: int, layer: int, tokens: range) -> None:
        """Say, from inside the forward, that a layer of a chunk lies in the prefill pool."""
        self._sender.mark_ready(self.transfer_ids[number], range(layer, layer + 1), tokens)

    def finish(self, first_tokens: Sequence[int]) -> None:
        """Commit every transfer, and wait until both sides are done with it; AssertionError if one was not received."""
        for transfer_id, token in zip(self.transfer_ids, first_tokens, strict=True):
            self._sender.commit(transfer_id, (SampledToken(0, token, 0.0),), {})
        received: dict[TransferId, int] = {}
        closed: list[TransferId] = []
        while len(closed) < 2 * len(self._prompts):
            event = self._events.get(timeout=WAIT_S)
            if isinstance(event, Received):
                received[event.transfer_id] = event.tokens[0].token_id
            elif isinstance(event, SendClosed | ReceiveClosed):
                closed.append(event.transfer_id)
        assert received == dict(zip(self.transfer_ids, first_tokens, strict=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in (self._sender, self._receiver):
            service.check_invariants()
            assert service.stop(WAIT_S)

    def _on_receive(self, event: ReceiveEvent) -> None:
        if isinstance(event, Opened):
            self._receiver.grant(event.transfer_id)
        self._events.put(event)


def _settings(engine: Engine, incarnation: Incarnation) -> LinkSettings:
    return LinkSettings(engine.identity, engine.capabilities, engine.layout, incarnation)
