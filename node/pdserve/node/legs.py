"""The legs that routers opened on this node: what was said of each, and to whom it must be said.

A leg is OPEN until its desk ends it, ENDED until its desk holds nothing more of it, then RELEASED: a tombstone that answers
repeated submits and cancels, bounded in number and time.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pdserve.core.clock import Clock
from pdserve.core.ids import Incarnation, LegKey, SessionKey
from pdserve.core.lifecycle import LifeCycle, TransitionTable
from pdserve.core.work import LegOutcome, SampledToken, TokenScore
from pdserve.node import pb
from pdserve.node.outbox import Outbox
from pdserve.v1 import node_pb2

logger = logging.getLogger(__name__)

MAX_TOMBSTONES = 4096
TOMBSTONE_S = 120.0
MAX_SCORES_PER_EVENT = 1024
"""Prompt tokens per event: with 20 alternatives each, at most 11 bytes apiece, an event stays under 256 KiB."""


class LegState(Enum):
    """Where a leg stands."""

    OPEN = "open"
    ENDED = "ended"
    RELEASED = "released"


class LegMove(Enum):
    """What a desk says of a leg."""

    END = "end"
    RELEASE = "release"


LEG_TABLE = TransitionTable(
    name="leg",
    initial=LegState.OPEN,
    terminal=frozenset({LegState.RELEASED}),
    moves={
        (LegState.OPEN, LegMove.END): LegState.ENDED,
        (LegState.ENDED, LegMove.RELEASE): LegState.RELEASED,
    },
    ignored=frozenset({(LegState.ENDED, LegMove.END), (LegState.RELEASED, LegMove.END)}),
)
"""OPEN -RELEASE and RELEASED -RELEASE are faults of a desk, and raise."""


@dataclass(slots=True)
class _Leg:
    key: LegKey
    life: LifeCycle[LegState, LegMove]
    label: str = ""
    released: node_pb2.LegEvent | None = None
    released_s: float = 0.0

    @property
    def log_fields(self) -> dict[str, object]:
        return {
            "request_id": self.label,
            "session_id": self.key.session.session_id,
            "attempt": self.key.attempt,
            "peer": self.key.session.router.hex()[:8],
        }


class Legs:
    """All legs of a node, and the outbox of each attached router.

    `on_output(router)` is called whenever something was added for that router.
    """

    def __init__(self, clock: Clock, on_output: Callable[[Incarnation], None]) -> None:
        self._clock = clock
        self._on_output = on_output
        self._outboxes: dict[Incarnation, Outbox] = {}
        self._open: dict[LegKey, _Leg] = {}
        self._over: OrderedDict[LegKey, _Leg] = OrderedDict()
        self._released = asyncio.Event()
        self.num_finished = 0
        """Legs that did their part, in all."""

    @property
    def num_open(self) -> int:
        """Legs that are not released."""
        return len(self._open)

    def attach(self, router: Incarnation) -> Outbox:
        """Give `router` a new, empty outbox."""
        self._outboxes[router] = Outbox()
        return self._outboxes[router]

    def detach(self, router: Incarnation) -> list[LegKey]:
        """Drop the router's outbox and return its open legs, which the desk must cancel."""
        self._outboxes.pop(router, None)
        return [key for key in self._open if key.session.router == router]

    def open(self, key: LegKey, label: str = "") -> bool:
        """Open a leg. False if it is known already; a released one is told again. `label` is the client's, for logs."""
        if key in self._open:
            return False
        if key in self._over:
            self.tell_released(key)
            return False
        leg = _Leg(key, LifeCycle(LEG_TABLE, str(key), self._clock.now_s()), label)
        self._open[key] = leg
        logger.debug("leg opened", extra=leg.log_fields)
        return True

    def is_open(self, key: LegKey) -> bool:
        """Whether the leg exists and is not released."""
        return key in self._open

    def of_session(self, session: SessionKey) -> list[LegKey]:
        """Return the open legs of a session."""
        return [key for key in self._open if key.session == session]

    def open_keys(self) -> list[LegKey]:
        """Return all open legs."""
        return list(self._open)

    def granted(self, key: LegKey, skip_tokens: int) -> None:
        """Report that blocks are promised."""
        self._tell(key, pb.granted_event(key, skip_tokens))

    def first_token(
        self, key: LegKey, tokens: Sequence[SampledToken], num_cached: int, durations_s: Mapping[str, float]
    ) -> None:
        """Report the first token of each sequence."""
        self._tell(key, pb.first_token_event(key, tokens, num_cached, durations_s))

    def prompt_scores(self, key: LegKey, start: int, scores: Sequence[TokenScore]) -> None:
        """Report scores of consecutive prompt tokens, the first of them at position `start`."""
        for at in range(0, len(scores), MAX_SCORES_PER_EVENT):
            piece = scores[at : at + MAX_SCORES_PER_EVENT]
            self._tell(key, pb.prompt_scores_event(key, start + at, piece))

    def adopted(self, key: LegKey, tokens: Sequence[SampledToken], durations_s: Mapping[str, float]) -> None:
        """Report that all KV is verified and placed."""
        self._tell(key, pb.adopted_event(key, tokens, durations_s))

    def token(self, key: LegKey, token: SampledToken) -> None:
        """Report one new token of a sequence."""
        outbox = self._outboxes.get(key.session.router)
        if outbox is not None:
            outbox.add_token(key, token)
            self._on_output(key.session.router)

    def end(self, key: LegKey, outcome: LegOutcome, reason: str, detail: str = "") -> bool:
        """Report the leg's end; only the first one counts. Returns whether this was it."""
        leg = self._open.get(key)
        if leg is None or not leg.life.advance(LegMove.END, self._clock.now_s()):
            return False
        self.num_finished += outcome is LegOutcome.FINISHED
        if outcome not in (LegOutcome.FINISHED, LegOutcome.CANCELLED):
            logger.warning("leg %s: %s %s", outcome.name.lower(), reason, detail, extra=leg.log_fields)
        else:
            logger.debug("leg %s: %s", outcome.name.lower(), reason, extra=leg.log_fields)
        self._tell(key, pb.ended_event(key, outcome, reason, detail))
        return True

    def release(
        self, key: LegKey, durations_s: Mapping[str, float] | None = None, kv_bytes: int = 0, kv_frames: int = 0
    ) -> None:
        """Report that nothing of the leg is left on this node; the leg must have ended."""
        leg = self._open.pop(key)
        now_s = self._clock.now_s()
        leg.life.advance(LegMove.RELEASE, now_s)
        leg.released = pb.released_event(key, durations_s or {}, kv_bytes, kv_frames)
        leg.released_s = now_s
        self._over[key] = leg
        self._bury(now_s)
        self._released.set()
        self._tell(key, leg.released)

    def refuse(self, key: LegKey, outcome: LegOutcome, reason: str, detail: str = "") -> None:
        """End and release a leg that was just opened."""
        self.end(key, outcome, reason, detail)
        self.release(key)

    def tell_released(self, key: LegKey) -> None:
        """Answer a cancel or a repeated submit of a leg that is over, or was never here."""
        leg = self._over.get(key)
        known = leg.released if leg is not None else None
        self._tell(key, known or pb.released_event(key, {}, 0, 0))

    async def wait_all_released(self, timeout_s: float) -> None:
        """Return when no leg is open, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._released.clear()
                    await self._released.wait()

    def pending_bytes(self) -> int:
        """Return the bytes that wait in all outboxes."""
        return sum(outbox.size_bytes for outbox in self._outboxes.values())

    def describe(self) -> list[dict[str, object]]:
        """Return the open legs with state and age, for GetState."""
        now_s = self._clock.now_s()
        return [
            {"leg": str(key), "state": leg.life.state.value, "age_s": round(leg.life.age_s(now_s), 3)}
            for key, leg in self._open.items()
        ]

    def _tell(self, key: LegKey, event: node_pb2.LegEvent) -> None:
        outbox = self._outboxes.get(key.session.router)
        if outbox is not None:
            outbox.add_event(key, event)
            self._on_output(key.session.router)

    def _bury(self, now_s: float) -> None:
        while self._over:
            oldest = next(iter(self._over.values()))
            if len(self._over) <= MAX_TOMBSTONES and now_s - oldest.released_s <= TOMBSTONE_S:
                return
            self._over.popitem(last=False)
