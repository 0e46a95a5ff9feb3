"""The prefill node's desk: carries events to the scheduler and its instructions to engine, corridor and router."""

from collections.abc import Callable, Sequence
from functools import singledispatchmethod

from pdserve import kvtransfer as kv
from pdserve.core.clock import Clock
from pdserve.core.hold import parse_hold
from pdserve.core.ids import Incarnation, LegKey
from pdserve.core.settings import PrefillSettings
from pdserve.core.work import Work, prompt_digest
from pdserve.engine.blocks import BlockPool
from pdserve.engine.engine import Engine
from pdserve.node.corridor import link_settings, on_loop
from pdserve.node.desk import EngineFacts, Load, violations
from pdserve.node.legs import Legs
from pdserve.node.loading import engine_facts
from pdserve.node.pb import LegOutcome, Peer
from pdserve.node.step_loop import StepLoop
from pdserve.prefill_node import scheduler as does
from pdserve.prefill_node.handoff import Handoff
from pdserve.prefill_node.scheduler import Instruction, PrefillLimits, PrefillScheduler, StepPlan
from pdserve.prefill_node.worker import PrefillWorker, StepRecord


class PrefillDesk:
    """Implements `node.desk.Desk`. All methods run on the event loop's thread."""

    def __init__(
        self,
        settings: PrefillSettings,
        engine: Engine,
        incarnation: Incarnation,
        legs: Legs,
        clock: Clock,
        load_changed: Callable[[], None],
    ) -> None:
        self._engine, self._legs, self._clock, self._load_changed = engine, legs, clock, load_changed
        self._facts = engine_facts(engine)
        self._pool = BlockPool(engine.num_blocks)
        limits = PrefillLimits(
            token_budget=settings.token_budget,
            max_prompts_per_step=settings.max_prompts_per_step,
            open_ahead=settings.open_ahead,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
        )
        self._scheduler = PrefillScheduler(limits, self._pool, engine.eos_token_ids, parse_hold(settings.hold_at))
        self._handoff = Handoff(engine)
        self._connected: set[Incarnation] = set()
        self._corridor = kv.KvSendService(
            link_settings(settings, engine, incarnation),
            self._handoff,
            on_loop(self._on_corridor),
            clock,
        )
        self._corridor.start()
        worker = PrefillWorker(engine, self._corridor.mark_ready, clock)
        self._steps: StepLoop[StepPlan, StepRecord] = StepLoop(
            plan=self._plan, execute=worker.execute, apply=self._apply, fail=self._fail, clock=clock
        )

    def facts(self) -> EngineFacts:
        """Return what hello says."""
        return self._facts

    def submit(self, work: Work) -> None:
        """Take a leg."""
        if max(work.context_ids) >= self._engine.vocab_size:
            detail = f"token ids must be below {self._engine.vocab_size}"
            self._legs.refuse(work.leg, LegOutcome.REFUSED, "bad_token_id", detail)
            return
        self._do(self._scheduler.submit(work, self._clock.now_s()))

    def cancel(self, leg: LegKey, reason: str) -> None:
        """End a leg."""
        self._do(self._scheduler.cancel(leg, LegOutcome.CANCELLED, reason, self._clock.now_s()))

    def drain(self, leg: LegKey) -> None:
        """Hand a leg back."""
        self._do(self._scheduler.cancel(leg, LegOutcome.DRAINED, "draining", self._clock.now_s()))

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Take the decode nodes that may be sent to."""
        self._corridor.set_peers({peer.incarnation: peer.kv_address for peer in peers if peer.kv_address})

    def tick(self, now_s: float) -> None:
        """Act on deadlines that passed."""
        self._do(self._scheduler.expire(now_s))

    def load(self) -> Load:
        """Return the present load."""
        return Load(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_waiting_tokens=self._scheduler.num_waiting_tokens,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            connected_peers=tuple(self._connected),
        )

    def step_age_s(self) -> float:
        """Return the age of the running step, seconds."""
        return self._steps.step_age_s()

    def gauges(self) -> dict[str, float]:
        """Return the role's gauges."""
        gauges = {
            "prefill.waiting": self._scheduler.num_waiting,
            "prefill.running": self._scheduler.num_running,
            "prefill.waiting_tokens": self._scheduler.num_waiting_tokens,
            "prefill.bound_transfers": self._handoff.num_bound,
            "held": self._scheduler.num_held,
            "steps": self._steps.num_steps,
            "failed_steps": self._steps.num_failed_steps,
            "forwards": self._engine.num_forwards,
            "blocks.total": self._pool.num_blocks,
            "blocks.free": self._pool.num_free,
            "blocks.used": self._pool.num_used,
            "blocks.reserved": self._pool.num_reserved,
            "blocks.cached": self._pool.num_cached,
        }
        return {name: float(value) for name, value in gauges.items()} | self._corridor.gauges()

    def describe(self) -> dict[str, object]:
        """Return every machine's state and age."""
        return {
            "jobs": self._scheduler.describe(self._clock.now_s()),
            "transfers": self._corridor.describe(),
            "lease_owners": self._pool.owners,
        }

    def check_invariants(self) -> list[str]:
        """Return what is wrong."""
        return violations((self._scheduler.check_invariants, self._corridor.check_invariants))

    async def run(self) -> None:
        """Run the step loop until cancelled."""
        await self._steps.run()

    def close(self) -> None:
        """Stop the corridor and the engine's thread."""
        self._steps.close()
        self._corridor.stop(timeout_s=2.0)

    def _plan(self) -> StepPlan | None:
        plan, instructions = self._scheduler.plan(self._clock.now_s())
        self._do(instructions, wake=False)
        return plan

    def _apply(self, plan: StepPlan, record: StepRecord) -> None:
        self._do(self._scheduler.step_done(plan, record.sampled, record.compute_s, self._clock.now_s()), wake=False)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        self._do(self._scheduler.step_failed(plan, str(error), self._clock.now_s()), wake=False)

    def _do(self, instructions: Sequence[Instruction], *, wake: bool = True) -> None:
        for instruction in instructions:
            self._execute(instruction)
        if wake:
            self._steps.wake()
        if instructions:
            self._load_changed()

    @singledispatchmethod
    def _execute(self, instruction: Instruction) -> None:
        raise AssertionError(f"an instruction without an executor: {instruction}")

    @_execute.register
    def _(self, do: does.OpenTransfer) -> None:
        work = do.work
        assert work.transfer_id is not None
        assert work.decode is not None
        self._corridor.open(
            kv.TransferSpec(
                transfer_id=work.transfer_id,
                attempt=work.leg.attempt,
                peer=work.decode,
                prompt_digest=prompt_digest(work.context_ids),
                num_tokens=work.context_len,
                arrived_s=work.arrived_s,
            )
        )

    @_execute.register
    def _(self, do: does.BindBlocks) -> None:
        self._handoff.bind(do.transfer_id, do.lease)

    @_execute.register
    def _(self, do: does.CommitTransfer) -> None:
        self._corridor.commit(do.transfer_id, do.tokens, do.durations_s)

    @_execute.register
    def _(self, do: does.AbortTransfer) -> None:
        self._corridor.abort(do.transfer_id, do.reason, finished=do.finished)

    @_execute.register
    def _(self, do: does.ReportFirstToken) -> None:
        self._legs.first_token(do.leg, do.tokens, 0, do.durations_s)

    @_execute.register
    def _(self, do: does.ReportEnd) -> None:
        self._legs.end(do.leg, do.outcome, do.reason, do.detail)

    @_execute.register
    def _(self, do: does.ReportRelease) -> None:
        self._legs.release(do.leg, do.durations_s, do.kv_bytes, do.kv_frames)

    def _on_corridor(self, event: kv.SendEvent) -> None:
        now_s = self._clock.now_s()
        match event:
            case kv.PeerUp():
                self._connected.add(event.incarnation)
                self._load_changed()
            case kv.PeerDown() | kv.PeerRefused():
                self._connected.discard(event.incarnation)
                self._load_changed()
            case kv.Granted():
                self._do(self._scheduler.granted(event.transfer_id, now_s))
            case kv.Acked():
                self._do(self._scheduler.acked(event.transfer_id, event.stats.exposed_s, now_s))
            case kv.SendFailed():
                self._do(
                    self._scheduler.transfer_failed(
                        event.transfer_id, event.reason, event.detail, busy=event.busy, now_s=now_s
                    )
                )
            case kv.SendClosed():
                self._handoff.unbind(event.transfer_id)
                stats = event.stats
                self._do(
                    self._scheduler.transfer_closed(
                        event.transfer_id, stats.kv_bytes, stats.num_frames, stats.pack_s, now_s
                    )
                )
