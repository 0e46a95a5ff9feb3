"""What the desks of both roles share: the step loop around a pure scheduler, the block pool, and what is told of them."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from pdserve.core.clock import Clock
from pdserve.core.ids import Incarnation, LegKey
from pdserve.core.work import LegOutcome, Work
from pdserve.engine.batch import ChunkResult
from pdserve.engine.blocks import BlockPool
from pdserve.engine.engine import Engine
from pdserve.grammar.compiler import GrammarCompiler
from pdserve.grammar.outcome import NotCompiled
from pdserve.kvtransfer import PeerDown, PeerRefused, PeerUp
from pdserve.node.bound_blocks import BoundBlocks
from pdserve.node.constraints import Constraints
from pdserve.node.desk import violations
from pdserve.node.legs import Legs
from pdserve.node.reports import LegReport, ReportEnd, ReportRelease
from pdserve.node.step_loop import StepLoop, StepRecord
from pdserve.node.transfer_record import TransferRecord

logger = logging.getLogger(__name__)

P = TypeVar("P")
I = TypeVar("I")  # noqa: E741 - an instruction


class StepScheduler(Protocol[P, I]):
    """A pure scheduler, as the step loop sees it."""

    def plan(self, now_s: float) -> tuple[P | None, list[I]]:
        """Return the next step, or None, and what to do before it."""
        ...

    def step_done(self, plan: P, results: Sequence[ChunkResult], compute_s: float, now_s: float) -> list[I]:
        """Take a step's results."""
        ...

    def step_failed(self, plan: P, detail: str, now_s: float) -> list[I]:
        """Take the failure of a step."""
        ...

    def cancel(self, leg: LegKey, outcome: LegOutcome, reason: str, now_s: float) -> list[I]:
        """End a leg at whatever stage it is."""
        ...

    def cancel_sequences(self, leg: LegKey, sequences: frozenset[int], reason: str, now_s: float) -> list[I]:
        """End some sequences of a leg."""
        ...

    def constraint_ready(self, leg: LegKey) -> list[I]:
        """What constrains a leg's output is compiled."""
        ...

    def constraint_failed(self, leg: LegKey, reason: str, detail: str, now_s: float) -> list[I]:
        """What should constrain a leg's output cannot be served."""
        ...

    def expire(self, now_s: float) -> list[I]:
        """Act on deadlines that passed."""
        ...

    @property
    def num_held(self) -> int:
        """Requests that stand at the test hook."""
        ...

    def describe(self, now_s: float) -> list[dict[str, object]]:
        """Return every request's state and age."""
        ...

    def check_invariants(self) -> None:
        """Raise if the books do not agree."""
        ...


class Corridor(Protocol):
    """Either end of the corridor, as a desk watches it."""

    def gauges(self) -> dict[str, float]:
        """Return its gauges."""
        ...

    def describe(self) -> list[dict[str, object]]:
        """Return its machines' states."""
        ...

    def check_invariants(self) -> None:
        """Raise if its books do not agree."""
        ...

    def stop(self, timeout_s: float) -> bool:
        """End its thread."""
        ...


class EngineDesk(ABC, Generic[P, I]):
    """A desk over one engine, one pool and one end of the corridor. All methods run on the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        scheduler: StepScheduler[P, I],
        grammars: GrammarCompiler,
        legs: Legs,
        clock: Clock,
        load_changed: Callable[[], None],
    ) -> None:
        self._engine, self._pool, self._legs, self._clock = engine, pool, legs, clock
        self._steps_of = scheduler
        self._load_changed = load_changed
        self._bound = BoundBlocks()
        self._constraints = Constraints(grammars, self._constraint_ready, self._constraint_failed)
        self._connected: set[Incarnation] = set()
        self._transfers = TransferRecord()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _open(self, corridor: Corridor, execute: Callable[[P], StepRecord]) -> None:
        """Watch the corridor, which was started, and have the step loop run plans by `execute`."""
        self._watched = corridor
        self._steps: StepLoop[P, StepRecord] = StepLoop(
            plan=self._plan, execute=execute, apply=self._apply, fail=self._fail, clock=self._clock
        )

    def cancel(self, leg: LegKey, reason: str) -> None:
        """End a leg."""
        self._do(self._steps_of.cancel(leg, LegOutcome.CANCELLED, reason, self._clock.now_s()))

    def cancel_sequences(self, leg: LegKey, sequences: frozenset[int], reason: str) -> None:
        """End some sequences of a leg."""
        self._do(self._steps_of.cancel_sequences(leg, sequences, reason, self._clock.now_s()))

    def drain(self, leg: LegKey) -> None:
        """Hand a leg back."""
        self._do(self._steps_of.cancel(leg, LegOutcome.DRAINED, "draining", self._clock.now_s()))

    def tick(self, now_s: float) -> None:
        """Act on deadlines that passed."""
        self._constraints.expire(now_s)
        self._do(self._steps_of.expire(now_s))

    def step_age_s(self) -> float:
        """Return the age of the running step, seconds."""
        return self._steps.step_age_s()

    def transfer_fault(self) -> str:
        """Return what keeps transfers from working, as far as the last ones tell."""
        return self._transfers.fault(self._clock.now_s())

    def gauges(self) -> dict[str, float]:
        """Return the gauges of both roles, and the corridor's."""
        gauges = {
            "held": self._steps_of.num_held,
            "steps": self._steps.num_steps,
            "failed_steps": self._steps.num_failed_steps,
            "forwards": self._engine.num_forwards,
            "blocks.total": self._pool.num_blocks,
            "blocks.free": self._pool.num_free,
            "blocks.used": self._pool.num_used,
            "blocks.shared": self._pool.num_shared,
            "blocks.reserved": self._pool.num_reserved,
            "blocks.cached": self._pool.num_cached,
            "bound_transfers": len(self._bound),
        }
        return (
            {name: float(value) for name, value in gauges.items()} | self._watched.gauges() | self._constraints.gauges()
        )

    def describe(self) -> dict[str, object]:
        """Return every machine's state and age."""
        return {
            "requests": self._steps_of.describe(self._clock.now_s()),
            "transfers": self._watched.describe(),
            "lease_owners": self._pool.owners,
        }

    def check_invariants(self) -> list[str]:
        """Return what is wrong."""
        books = (self._steps_of, self._watched, self._constraints)
        return violations([each.check_invariants for each in books])

    async def wait_broken(self) -> str:
        """Return why the corridor broke, once it has."""
        return await self._broken

    async def run(self) -> None:
        """Run the step loop until cancelled."""
        await self._steps.run()

    def close(self) -> None:
        """Stop the engine's thread and the corridor."""
        self._steps.close()
        self._watched.stop(timeout_s=2.0)
        self._constraints.close()

    @abstractmethod
    def _execute(self, instruction: I) -> None:
        """Do what the scheduler wants."""

    def _refuses_ids(self, work: Work) -> bool:
        """Whether the leg names a token id that the model does not have; it is then refused."""
        sampling, limit = work.sampling, self._engine.vocab_size
        named = {
            "prompt_ids": work.prompt_ids,
            "output_ids": work.output_ids,
            "sampling.logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "sampling.allowed_token_ids": sampling.allowed_token_ids,
            "sampling.banned_token_ids": sampling.banned_token_ids,
            "sampling.banned_sequences": [token_id for ids in sampling.banned_sequences for token_id in ids],
        }
        wrong = [name for name, token_ids in named.items() if max(token_ids, default=0) >= limit]
        if wrong:
            detail = f"{', '.join(wrong)}: token ids must be below {limit}"
            self._legs.refuse(work.leg, LegOutcome.REFUSED, "bad_token_id", detail)
        return bool(wrong)

    def _report(self, report: LegReport) -> None:
        match report:
            case ReportEnd():
                self._legs.end(report.leg, report.outcome, report.reason, report.detail)
            case ReportRelease():
                self._constraints.end(report.leg)
                self._legs.release(report.leg, report.durations_s, report.kv_bytes, report.kv_frames)

    def _constraint_ready(self, leg: LegKey) -> None:
        self._do(self._steps_of.constraint_ready(leg))

    def _constraint_failed(self, leg: LegKey, outcome: LegOutcome, why: NotCompiled) -> None:
        now_s = self._clock.now_s()
        if outcome is LegOutcome.REFUSED:
            self._do(self._steps_of.constraint_failed(leg, why.cause.value, why.reason, now_s))
        else:
            self._do(self._steps_of.cancel(leg, outcome, why.cause.value, now_s))

    def _break(self, reason: str) -> None:
        """The corridor's thread is gone: let the process end, and be started again."""
        if not self._broken.done():
            self._broken.set_result(f"the KV corridor broke: {reason}")

    def _on_peer(self, event: PeerUp | PeerDown | PeerRefused) -> None:
        if isinstance(event, PeerUp):
            self._connected.add(event.incarnation)
        else:
            self._connected.discard(event.incarnation)
        if isinstance(event, PeerRefused):
            # The handshake is not tried again, so nothing else would ever say why.
            told = f"{', '.join(event.fields)} ({event.detail})" if event.detail else ", ".join(event.fields)
            logger.error(
                "a peer can never be linked to this node: %s", told, extra={"peer": event.incarnation.hex()[:8]}
            )
        self._load_changed()

    def _transfer_failed(self, reason: str, *, busy: bool) -> None:
        """Remember it, unless there was only no room."""
        if not busy:
            self._transfers.failed(reason, self._clock.now_s())

    def _do(self, instructions: Sequence[I], *, wake: bool = True) -> None:
        for instruction in instructions:
            self._execute(instruction)
        if wake:
            self._steps.wake()
        if instructions:
            self._load_changed()

    def _plan(self) -> P | None:
        plan, instructions = self._steps_of.plan(self._clock.now_s())
        self._do(instructions, wake=False)
        return plan

    def _apply(self, plan: P, record: StepRecord) -> None:
        now_s = self._clock.now_s()
        self._do(self._steps_of.step_done(plan, record.results, record.compute_s, now_s), wake=False)

    def _fail(self, plan: P, error: Exception) -> None:
        self._do(self._steps_of.step_failed(plan, str(error), self._clock.now_s()), wake=False)
