"""KV leaves while later layers still compute: shown by order of events, with the real engine, worker and corridor.

The last layer of the last chunk is not let go on before the DATA of its first layer was handed to the channel. A node that
framed after the prefill would wait here until the deadline, and the test would be red.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig

from pdserve.core.clock import SystemClock
from pdserve.core.ids import TransferId, new_incarnation
from pdserve.core.lifecycle import LifeCycle
from pdserve.core.work import SampledToken, prompt_digest
from pdserve.engine.batch import SequenceChunk, StepResult
from pdserve.engine.blocks import BlockPool
from pdserve.engine.engine import Engine
from pdserve.kvtransfer import Granted, KvReceiveService, KvSendService, LinkSettings, Opened, Received, TransferSpec
from pdserve.kvtransfer.admission import Credentials
from pdserve.kvtransfer.channel import Channel, ChannelEvent, Route
from pdserve.kvtransfer.codec import decode
from pdserve.kvtransfer.inprocess import InProcessNetwork
from pdserve.kvtransfer.messages import Data
from pdserve.node.bound_blocks import BoundBlocks
from pdserve.prefill_node.handoff import Handoff
from pdserve.prefill_node.instructions import PlannedChunk, StepPlan
from pdserve.prefill_node.job import JOB_TABLE, Job
from pdserve.prefill_node.worker import PrefillWorker
from tests.kvtransfer.nodes import WAIT_S, Events
from tests.node.works import work

NUM_TOKENS = 192
CHUNK = 128
NUM_LAYERS = 4


class WatchedChannel:
    """A channel that tells when DATA with a layer of the last chunk was enqueued."""

    def __init__(
        self, channel: Channel, enqueued: list[tuple[range, range]], first_layer_left: threading.Event
    ) -> None:
        self._channel, self._enqueued, self._first_layer_left = channel, enqueued, first_layer_left

    def send_data(self, route: Route, header: bytes, payload: memoryview, on_released: Callable[[], None]) -> bool:
        message, _ = decode((header, payload))
        assert isinstance(message, Data)
        self._enqueued.append((message.layers, message.tokens))
        if 0 in message.layers and NUM_TOKENS - 1 in message.tokens:
            self._first_layer_left.set()
        return self._channel.send_data(route, header, payload, on_released)

    def listen(self, host: str, port: int) -> str:
        return self._channel.listen(host, port)

    def connect(self, address: str, shown: Credentials | None = None) -> Route:
        return self._channel.connect(address, shown)

    def trust(self, route: Route) -> None:
        self._channel.trust(route)

    def disconnect(self, route: Route) -> None:
        self._channel.disconnect(route)

    def send(self, route: Route, header: bytes) -> bool:
        return self._channel.send(route, header)

    def poll(self, timeout_s: float | None) -> list[ChannelEvent]:
        return self._channel.poll(timeout_s)

    def gauges(self) -> dict[str, float]:
        return self._channel.gauges()

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._channel.close()


def write_wide_model(folder: Path) -> Path:
    """Write a model whose 64 tokens of one layer fill a frame of 256 KiB, so that each layer is sent by itself."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class GatedEngine(Engine):
    """An engine whose last layer of the last chunk waits, inside the forward, for the first layer's DATA."""

    first_layer_left: threading.Event
    left_in_time = False

    def step(self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None) -> StepResult:
        is_last = chunks[0].start + len(chunks[0].token_ids) == NUM_TOKENS

        def gated(layer: int) -> None:
            if on_layer is not None:
                on_layer(layer)
            if is_last and layer == NUM_LAYERS - 2:
                self.left_in_time = self.first_layer_left.wait(WAIT_S)

        return super().step(chunks, gated)


def test_the_first_layer_leaves_before_the_last_one_ran(tmp_path: Path) -> None:
    network, first_layer_left = InProcessNetwork(), threading.Event()
    engine = GatedEngine.load(write_wide_model(tmp_path), block_size=16, num_blocks=16)
    assert isinstance(engine, GatedEngine)
    engine.first_layer_left = first_layer_left
    enqueued: list[tuple[range, range]] = []
    sent, received = Events(), Events()
    mine, theirs = (
        LinkSettings(engine.identity, engine.capabilities, engine.layout, new_incarnation()) for _ in range(2)
    )
    bound = BoundBlocks()
    handoff = Handoff(engine, bound)
    target = Engine.load(tmp_path, block_size=32, num_blocks=8)
    corridor = KvSendService(
        mine, handoff, sent, make_channel=lambda: WatchedChannel(network.channel(), enqueued, first_layer_left)
    )
    intake = _Intake(target)
    far_end = KvReceiveService(theirs, intake, received, make_channel=network.channel)
    far_end.start()
    corridor.start()
    try:
        leg = work(1, prompt=NUM_TOKENS)
        assert leg.transfer_id is not None
        far_end.set_peers(frozenset({mine.incarnation}))
        corridor.set_peers({theirs.incarnation: far_end.endpoint})
        digest = prompt_digest(leg.context_ids)
        far_end.expect(TransferSpec(leg.transfer_id, 1, mine.incarnation, digest, NUM_TOKENS, 0.0))
        corridor.open(TransferSpec(leg.transfer_id, 1, theirs.incarnation, digest, NUM_TOKENS, 0.0))
        received.wait(Opened)
        far_end.grant(leg.transfer_id)
        sent.wait(Granted)
        job = Job(leg, 0.0, LifeCycle(JOB_TABLE, "job", 0.0), BlockPool(16).lease(12, "job"))
        assert job.lease is not None
        bound.bind(leg.transfer_id, job.lease)
        worker = PrefillWorker(engine, corridor.mark_ready, lambda _: None, SystemClock())
        for start in range(0, NUM_TOKENS, CHUNK):
            stop = min(NUM_TOKENS, start + CHUNK)
            worker.execute(StepPlan((PlannedChunk(job, range(start, stop), (0,) if stop == NUM_TOKENS else ()),)))
        assert engine.left_in_time, "DATA of layer 0 was enqueued only after the whole prefill"
        corridor.commit(leg.transfer_id, (SampledToken(0, 1, -0.5),), {})
        received.wait(Received)
        assert sorted({layer for layers, _ in enqueued for layer in layers}) == list(range(NUM_LAYERS))
    finally:
        corridor.stop()
        far_end.stop()


class _Intake:
    """Places into the first blocks of the far engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        self._engine.unpack(layers, range(8), tokens, payload)
