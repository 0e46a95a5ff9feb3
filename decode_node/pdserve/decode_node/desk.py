"""The decode node's desk: carries events to the scheduler and its instructions to engine, corridor and router."""

from collections.abc import Callable, Sequence
from functools import singledispatchmethod

from pdserve import kvtransfer as kv
from pdserve.core.clock import Clock
from pdserve.core.hold import parse_hold
from pdserve.core.ids import Incarnation, LegKey
from pdserve.core.settings import DecodeSettings
from pdserve.core.work import Work, prompt_digest
from pdserve.decode_node import scheduler as does
from pdserve.decode_node.intake import Intake
from pdserve.decode_node.scheduler import DecodeLimits, DecodeScheduler, Instruction, StepPlan
from pdserve.decode_node.sequence import SequenceState
from pdserve.decode_node.worker import DecodeWorker, StepRecord
from pdserve.engine.blocks import BlockPool
from pdserve.engine.engine import Engine
from pdserve.node.corridor import link_settings, on_loop
from pdserve.node.desk import EngineFacts, Load, violations
from pdserve.node.legs import Legs
from pdserve.node.loading import engine_facts
from pdserve.node.pb import LegOutcome, Peer
from pdserve.node.step_loop import StepLoop

WAITING_STATES = (SequenceState.EXPECTED, SequenceState.WAITING, SequenceState.RECEIVING, SequenceState.READY)


class DecodeDesk:
    """Implements `node.desk.Desk`. All methods run on the event loop's thread."""

    def __init__(
        self,
        settings: DecodeSettings,
        engine: Engine,
        incarnation: Incarnation,
        legs: Legs,
        clock: Clock,
        load_changed: Callable[[], None],
    ) -> None:
        self._engine, self._legs, self._clock, self._load_changed = engine, legs, clock, load_changed
        self._pool = BlockPool(engine.num_blocks)
        limits = DecodeLimits(
            max_batch=settings.max_batch,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            growth_blocks=settings.growth_blocks,
            reserve_on_submit=settings.reserve == "on_submit",
        )
        self._scheduler = DecodeScheduler(limits, self._pool, engine.eos_token_ids, parse_hold(settings.hold_at))
        self._intake = Intake(engine)
        self._connected: set[Incarnation] = set()
        self._corridor = kv.KvReceiveService(
            link_settings(settings, engine, incarnation),
            self._intake,
            on_loop(self._on_corridor),
            host=settings.host,
            port=settings.kv_port,
            advertise=settings.kv_advertise or settings.advertise or "",
            clock=clock,
        )
        self._corridor.start()
        self._facts = engine_facts(engine, self._corridor.endpoint)
        worker = DecodeWorker(engine, clock)
        self._steps: StepLoop[StepPlan, StepRecord] = StepLoop(
            plan=self._plan, execute=worker.execute, apply=self._apply, fail=self._fail, clock=clock
        )

    def facts(self) -> EngineFacts:
        """Return what hello says."""
        return self._facts

    def submit(self, work: Work) -> None:
        """Take a leg."""
        self._do(self._scheduler.submit(work, self._clock.now_s()))

    def cancel(self, leg: LegKey, reason: str) -> None:
        """End a leg."""
        self._do(self._scheduler.cancel(leg, LegOutcome.CANCELLED, reason, self._clock.now_s()))

    def drain(self, leg: LegKey) -> None:
        """Hand a leg back."""
        self._do(self._scheduler.cancel(leg, LegOutcome.DRAINED, "draining", self._clock.now_s()))

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Take the prefill nodes that may connect."""
        self._corridor.set_peers(frozenset(peer.incarnation for peer in peers))

    def tick(self, now_s: float) -> None:
        """Act on deadlines that passed."""
        self._do(self._scheduler.expire(now_s))

    def load(self) -> Load:
        """Return the present load."""
        return Load(
            num_waiting=self._scheduler.count(*WAITING_STATES),
            num_running=self._scheduler.count(SequenceState.RUNNING),
            num_waiting_tokens=0,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            connected_peers=tuple(self._connected),
        )

    def step_age_s(self) -> float:
        """Return the age of the running step, seconds."""
        return self._steps.step_age_s()

    def gauges(self) -> dict[str, float]:
        """Return the role's gauges."""
        states = {f"decode.{state.value}": self._scheduler.count(state) for state in SequenceState}
        gauges = {
            **states,
            "decode.stalled": self._scheduler.num_stalled,
            "decode.evicted_total": self._scheduler.num_evicted,
            "decode.bound_transfers": self._intake.num_bound,
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
            "sequences": self._scheduler.describe(self._clock.now_s()),
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
    def _(self, do: does.ExpectTransfer) -> None:
        work = do.work
        assert work.transfer_id is not None
        self._corridor.expect(
            kv.TransferSpec(
                transfer_id=work.transfer_id,
                attempt=work.leg.attempt,
                peer=work.prefill,
                prompt_digest=prompt_digest(work.context_ids),
                num_tokens=work.context_len,
                arrived_s=work.arrived_s,
            )
        )

    @_execute.register
    def _(self, do: does.GrantTransfer) -> None:
        self._intake.bind(do.transfer_id, do.lease)
        self._corridor.grant(do.transfer_id, do.skip_tokens)
        self._legs.granted(do.leg, do.skip_tokens)

    @_execute.register
    def _(self, do: does.CancelTransfer) -> None:
        self._corridor.cancel(do.transfer_id, do.reason)

    @_execute.register
    def _(self, do: does.ReportAdopted) -> None:
        self._legs.adopted(do.leg, do.tokens, do.durations_s)

    @_execute.register
    def _(self, do: does.ReportToken) -> None:
        self._legs.tokens(do.leg, do.token)

    @_execute.register
    def _(self, do: does.ReportEnd) -> None:
        self._legs.end(do.leg, do.outcome, do.reason, do.detail)

    @_execute.register
    def _(self, do: does.ReportRelease) -> None:
        self._legs.release(do.leg, do.durations_s)

    def _on_corridor(self, event: kv.ReceiveEvent) -> None:
        now_s = self._clock.now_s()
        match event:
            case kv.PeerUp():
                self._connected.add(event.incarnation)
                self._load_changed()
            case kv.PeerDown():
                self._connected.discard(event.incarnation)
                self._load_changed()
            case kv.Opened():
                self._do(self._scheduler.opened(event.transfer_id, now_s))
            case kv.Received():
                place_s = event.stats.place_s
                self._do(self._scheduler.received(event.transfer_id, event.tokens, place_s, now_s))
            case kv.FinishedEarly():
                self._do(self._scheduler.finished_early(event.transfer_id, now_s))
            case kv.ReceiveFailed():
                self._do(self._scheduler.transfer_failed(event.transfer_id, event.reason, event.detail, now_s))
            case kv.ReceiveClosed():
                self._intake.unbind(event.transfer_id)
                self._do(self._scheduler.transfer_closed(event.transfer_id, now_s))
