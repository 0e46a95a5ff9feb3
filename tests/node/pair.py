"""A prefill and a decode desk in one event loop, over the real engine and the real corridor; the test is their router."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import torch

from pdserve.core.clock import SystemClock
from pdserve.core.ids import Incarnation, LegKey, new_incarnation
from pdserve.core.node_settings import DecodeSettings, PrefillSettings
from pdserve.core.settings import load_settings
from pdserve.core.work import SampledToken, Work
from pdserve.decode_node.desk import DecodeDesk
from pdserve.node.legs import Legs
from pdserve.node.pb import Peer
from pdserve.prefill_node.desk import PrefillDesk
from pdserve.v1 import node_pb2
from tests.engine.small import small_engine
from tests.node.works import ROUTER

DEADLINE_S = 30.0
PREFILL_BLOCK_SIZE, DECODE_BLOCK_SIZE = 4, 5
LEAK_GAUGES = ("blocks.used", "blocks.reserved", "bound_transfers", "kv_transfers", "kv_staging_bytes", "constraints")


@dataclass
class Told:
    """What one node said of one leg, in order."""

    tokens: dict[int, list[SampledToken]] = field(default_factory=dict)
    """By sequence: first tokens as reported or adopted, then those of the steps."""
    scores: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    outcome: str = ""
    reason: str = ""


@dataclass
class Node:
    """One desk, and what it told."""

    desk: PrefillDesk | DecodeDesk
    legs: Legs
    incarnation: Incarnation
    told: dict[int, Told] = field(default_factory=dict)

    def of(self, session_id: int) -> Told:
        return self.told.setdefault(session_id, Told())

    def take(self) -> None:
        """Read the outbox to its end."""
        outbox = self.legs._outboxes[ROUTER]
        while (message := outbox.take()) is not None:
            assert message.ByteSize() <= 1 << 20
            for entry in message.tokens:
                self._take_tokens(entry)
            for event in message.events:
                self._take_event(event)

    def _take_tokens(self, entry: node_pb2.SequenceTokens) -> None:
        tops = [dict(zip(top.token_ids, top.logprobs, strict=True)) for top in entry.top_logprobs]
        assert len(tops) in (0, len(entry.token_ids))
        known = self.of(entry.session_id).tokens.setdefault(entry.sequence, [])
        for place, token_id in enumerate(entry.token_ids):
            top = tuple(tops[place].items()) if tops else ()
            index = entry.first_index + place
            known.append(SampledToken(index, token_id, entry.logprobs[place], None, entry.sequence, top))

    def _take_event(self, event: node_pb2.LegEvent) -> None:
        told, kind = self.of(event.session_id), str(event.WhichOneof("event"))
        told.events.append(kind)
        if kind in ("first_token", "adopted"):
            for first in event.first_token.tokens if kind == "first_token" else event.adopted.tokens:
                top = tuple(zip(first.top_logprobs.token_ids, first.top_logprobs.logprobs, strict=True))
                token = SampledToken(first.index, first.token_id, first.logprob, None, first.sequence, top)
                told.tokens.setdefault(first.sequence, []).insert(0, token)
        elif kind == "prompt_logprobs":
            body = event.prompt_logprobs
            assert body.start == len(told.scores) + 1
            tops = [dict(zip(top.token_ids, top.logprobs, strict=True)) for top in body.top_logprobs]
            told.scores += zip(body.logprobs, tops or [{}] * len(body.logprobs), strict=True)
        elif kind == "ended":
            told.outcome = node_pb2.LegOutcome.Name(event.ended.outcome).removeprefix("LEG_OUTCOME_")
            told.reason = event.ended.reason


@dataclass
class Pair:
    """Both nodes. `progress` is set whenever one of them says something."""

    prefill: Node
    decode: Node
    progress: asyncio.Event
    on_progress: Callable[[], None] = lambda: None

    def submit(self, work: Work) -> None:
        """Give a leg to both nodes, or to the prefill node alone if nothing is handed over."""
        decode = self.decode.incarnation if work.transfer_id is not None else None
        addressed = replace(work, prefill=self.prefill.incarnation, decode=decode)
        for node in (self.decode, self.prefill) if decode else (self.prefill,):
            assert node.legs.open(work.leg)
            node.desk.submit(addressed)

    def cancel(self, leg: LegKey, *sequences: int) -> None:
        """End a leg, or some of its sequences, on both nodes."""
        for node in (self.prefill, self.decode):
            if node.legs.is_open(leg):
                if sequences:
                    node.desk.cancel_sequences(leg, frozenset(sequences), "stop")
                else:
                    node.desk.cancel(leg, "client")

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return when `holds`, looking whenever a node said something."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self._take()
                self.on_progress()
                if holds():
                    self._take()
                    return
                await self.progress.wait()
                self.progress.clear()

    def _take(self) -> None:
        self.prefill.take()
        self.decode.take()

    async def finish(self) -> None:
        """Return when every leg is released on both nodes."""
        await self.until(lambda: self.prefill.legs.num_open == self.decode.legs.num_open == 0)

    async def outputs(self, *works: Work) -> dict[int, dict[int, list[int]]]:
        """Run legs together; token ids by session and sequence."""
        for work in works:
            self.submit(work)
        await self.finish()
        sessions = [work.leg.session.session_id for work in works]
        return {session: self.output(session) for session in sessions}

    def output(self, session: int) -> dict[int, list[int]]:
        """Return the token ids of a session by sequence: the decode node's, or the prefill node's where it had none."""
        prefill, decode = self.prefill.of(session).tokens, self.decode.of(session).tokens
        firsts = {sequence: tokens[0].token_id for sequence, tokens in prefill.items()}
        assert all(
            tokens[0].token_id == firsts[sequence] for sequence, tokens in decode.items() if tokens[0].index == 0
        )
        return {
            sequence: [token.token_id for token in (decode.get(sequence) or tokens)]
            for sequence, tokens in prefill.items()
        }


@asynccontextmanager
async def pair(
    *, blocks: int = 64, batch: int = 16, growth: int = 0, budget: int = 7, faults: str | None = None
) -> AsyncIterator[Pair]:
    """Yield two connected nodes; at the end nothing may be left of any leg, and the books must agree.

    `faults` is what `--kv-faults` gives the prefill node.
    """
    torch.set_num_threads(1)  # two engines step at once, and their tensors are tiny
    progress, clock = asyncio.Event(), SystemClock()

    def prefill_desk(incarnation: Incarnation, legs: Legs) -> PrefillDesk:
        engine = small_engine(block_size=PREFILL_BLOCK_SIZE, num_blocks=64)
        settings = load_settings(PrefillSettings, {"model": "tiny", "token_budget": budget, "kv_faults": faults})
        return PrefillDesk(settings, engine, incarnation, legs, clock, progress.set)

    def decode_desk(incarnation: Incarnation, legs: Legs) -> DecodeDesk:
        engine = small_engine(block_size=DECODE_BLOCK_SIZE, num_blocks=blocks)
        settings = load_settings(DecodeSettings, {"model": "tiny", "max_batch": batch, "growth_blocks": growth})
        return DecodeDesk(settings, engine, incarnation, legs, clock, progress.set)

    nodes: list[Node] = []
    for make in (prefill_desk, decode_desk):
        legs, incarnation = Legs(clock, lambda _router: progress.set()), new_incarnation()
        legs.attach(ROUTER)
        nodes.append(Node(make(incarnation, legs), legs, incarnation))
    prefill, decode = nodes
    for node in nodes:
        # Freed blocks hold NaN: whoever still reads them is found out.
        node.desk._pool._on_free = node.desk._engine.poison
    decode.desk.set_peers((Peer(prefill.incarnation, ""),))
    prefill.desk.set_peers(
        (Peer(decode.incarnation, decode.desk.facts().kv_address, decode.desk.load().kv_admission_key),)
    )
    running = [asyncio.create_task(node.desk.run()) for node in nodes]
    made = Pair(prefill, decode, progress)
    try:
        await made.until(lambda: bool(prefill.desk._connected and decode.desk._connected))
        yield made
        await made.finish()
        for node in nodes:
            assert node.desk.check_invariants() == []
            assert {name: node.desk.gauges().get(name, 0.0) for name in LEAK_GAUGES} == dict.fromkeys(LEAK_GAUGES, 0.0)
            assert node.desk.gauges()["failed_steps"] == 0
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for node in nodes:
            node.desk.close()
