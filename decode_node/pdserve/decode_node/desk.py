"""The decode node's desk: carries events to the scheduler and its instructions to engine, corridor and router."""

from collections.abc import Callable

from pdserve import kvtransfer as kv
from pdserve.core.clock import Clock
from pdserve.core.hold import parse_hold
from pdserve.core.ids import Incarnation
from pdserve.core.node_settings import DecodeSettings
from pdserve.core.work import Work
from pdserve.decode_node.instructions import (
    CancelTransfer,
    ExpectTransfer,
    GrantTransfer,
    Instruction,
    ReportAdopted,
    ReportToken,
    StepPlan,
)
from pdserve.decode_node.intake import Intake
from pdserve.decode_node.leg import LegStage
from pdserve.decode_node.limits import DecodeLimits
from pdserve.decode_node.scheduler import DecodeScheduler
from pdserve.decode_node.sequence import SequenceState
from pdserve.decode_node.worker import DecodeWorker
from pdserve.engine.blocks import BlockPool
from pdserve.engine.engine import Engine
from pdserve.kvtransfer.admission import Admission
from pdserve.node.constraints import grammar_compiler
from pdserve.node.corridor import corridor_channel, link_settings, on_loop, transfer_spec
from pdserve.node.desk import EngineFacts, Load
from pdserve.node.engine_desk import EngineDesk
from pdserve.node.legs import Legs
from pdserve.node.loading import engine_facts
from pdserve.node.pb import Peer
from pdserve.node.reports import ReportEnd, ReportRelease
from pdserve.node.small_wire import small_sink

LIVE_STATES = (SequenceState.READY, SequenceState.RUNNING)


class DecodeDesk(EngineDesk[StepPlan, Instruction]):
    """Implements `node.desk.Desk` for received contexts."""

    def __init__(
        self,
        settings: DecodeSettings,
        engine: Engine,
        incarnation: Incarnation,
        legs: Legs,
        clock: Clock,
        load_changed: Callable[[], None],
    ) -> None:
        pool = BlockPool(engine.num_blocks)
        limits = DecodeLimits(
            max_batch=settings.max_batch,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            growth_blocks=settings.growth_blocks,
            reserve_on_submit=settings.reserve == "on_submit",
        )
        self._scheduler = DecodeScheduler(limits, pool, engine.eos_token_ids, parse_hold(settings.hold_at))
        super().__init__(
            engine, pool, self._scheduler, grammar_compiler(settings, engine, clock), legs, clock, load_changed
        )
        link = link_settings(settings, engine, incarnation)
        self._admission = Admission(incarnation, settings.secret, clock)
        self._corridor = kv.KvReceiveService(
            link,
            small_sink(Intake(engine, self._bound), link),
            on_loop(self._on_corridor),
            host=settings.host,
            port=settings.kv_port,
            advertise=settings.kv_advertise or settings.advertise or "",
            clock=clock,
            make_channel=corridor_channel(settings, clock, self._admission),
        )
        self._corridor.start()
        self._facts = engine_facts(engine, link.capabilities, self._corridor.endpoint)
        self._open(self._corridor, DecodeWorker(engine, self._constraints.matcher, clock).execute)

    def facts(self) -> EngineFacts:
        """Return what hello says."""
        return self._facts

    def submit(self, work: Work) -> None:
        """Take a leg."""
        if not self._refuses_ids(work):
            self._constraints.begin(work)
            self._do(self._scheduler.submit(work, self._clock.now_s()))

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Take the prefill nodes that may connect."""
        self._corridor.set_peers(frozenset(peer.incarnation for peer in peers))

    def load(self) -> Load:
        """Return the present load."""
        return Load(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_waiting_tokens=0,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free,
            connected_peers=tuple(self._connected),
            kv_admission_key=self._admission.key(),
        )

    def gauges(self) -> dict[str, float]:
        """Return the role's gauges."""
        own = {
            **{f"decode.{stage.value}": self._scheduler.count_legs(stage) for stage in LegStage},
            **{f"decode.{state.value}": self._scheduler.count(state) for state in LIVE_STATES},
            "decode.stalled": self._scheduler.num_stalled,
            "decode.evicted_total": self._scheduler.num_evicted,
            "decode.copied_total": self._scheduler.num_copied,
        }
        return {name: float(value) for name, value in own.items()} | super().gauges()

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case ExpectTransfer(work):
                self._corridor.expect(transfer_spec(work, work.prefill))
            case GrantTransfer(leg, transfer_id, lease, skip_tokens):
                self._bound.bind(transfer_id, lease)
                self._corridor.grant(transfer_id, skip_tokens)
                self._legs.granted(leg, skip_tokens)
            case CancelTransfer(transfer_id, reason, is_busy):
                self._corridor.cancel(transfer_id, reason, is_busy)
            case ReportAdopted(leg, tokens, durations_s):
                self._legs.adopted(leg, tokens, durations_s)
            case ReportToken(leg, token):
                self._legs.token(leg, token)
            case ReportEnd() | ReportRelease():
                self._report(instruction)

    def _on_corridor(self, event: kv.ReceiveEvent) -> None:
        now_s, scheduler = self._clock.now_s(), self._scheduler
        match event:
            case kv.PeerUp() | kv.PeerDown() | kv.PeerRefused():
                self._on_peer(event)
            case kv.Opened(transfer_id):
                self._do(scheduler.opened(transfer_id, now_s))
            case kv.Received(transfer_id, tokens, _, stats):
                self._transfers.worked()
                self._do(scheduler.received(transfer_id, tokens, stats.grant_wait_s, stats.place_s, now_s))
            case kv.FinishedEarly(transfer_id):
                self._do(scheduler.finished_early(transfer_id, now_s))
            case kv.ReceiveFailed(transfer_id, reason, detail, busy):
                self._transfer_failed(reason, busy=busy)
                self._do(scheduler.transfer_failed(transfer_id, reason, detail, busy=busy, now_s=now_s))
            case kv.ReceiveClosed(transfer_id):
                self._bound.unbind(transfer_id)
                self._do(scheduler.transfer_closed(transfer_id, now_s))
            case kv.CorridorBroken(reason):
                self._break(reason)
