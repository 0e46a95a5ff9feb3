"""The prefill node's desk: carries events to the scheduler and its instructions to engine, corridor and router."""

from collections.abc import Callable

from pdserve import kvtransfer as kv
from pdserve.core.clock import Clock
from pdserve.core.hold import parse_hold
from pdserve.core.ids import Incarnation
from pdserve.core.node_settings import PrefillSettings
from pdserve.core.work import Work
from pdserve.engine.blocks import BlockPool
from pdserve.engine.engine import Engine
from pdserve.node.constraints import grammar_compiler
from pdserve.node.corridor import corridor_channel, link_settings, on_loop, transfer_spec
from pdserve.node.desk import EngineFacts, Load
from pdserve.node.engine_desk import EngineDesk
from pdserve.node.legs import Legs
from pdserve.node.loading import engine_facts
from pdserve.node.pb import Peer
from pdserve.node.reports import ReportEnd, ReportRelease
from pdserve.node.small_wire import small_source
from pdserve.prefill_node.handoff import Handoff
from pdserve.prefill_node.instructions import (
    AbortTransfer,
    BindBlocks,
    CommitTransfer,
    Instruction,
    OpenTransfer,
    ReportFirstToken,
    ReportPromptScores,
    StepPlan,
)
from pdserve.prefill_node.scheduler import PrefillLimits, PrefillScheduler
from pdserve.prefill_node.worker import PrefillWorker


class PrefillDesk(EngineDesk[StepPlan, Instruction]):
    """Implements `node.desk.Desk` for prompts."""

    def __init__(
        self,
        settings: PrefillSettings,
        engine: Engine,
        incarnation: Incarnation,
        legs: Legs,
        clock: Clock,
        load_changed: Callable[[], None],
    ) -> None:
        pool = BlockPool(engine.num_blocks)
        limits = PrefillLimits(
            token_budget=settings.token_budget,
            max_prompts_per_step=settings.max_prompts_per_step,
            open_ahead=settings.open_ahead,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
        )
        self._scheduler = PrefillScheduler(limits, pool, engine.eos_token_ids, parse_hold(settings.hold_at))
        super().__init__(
            engine, pool, self._scheduler, grammar_compiler(settings, engine, clock), legs, clock, load_changed
        )
        link = link_settings(settings, engine, incarnation)
        self._facts = engine_facts(engine, link.capabilities)
        self._corridor = kv.KvSendService(
            link,
            small_source(Handoff(engine, self._bound), link),
            on_loop(self._on_corridor),
            clock,
            make_channel=corridor_channel(settings, clock),
        )
        self._corridor.start()
        self._open(
            self._corridor, PrefillWorker(engine, self._corridor.mark_ready, self._constraints.matcher, clock).execute
        )

    def facts(self) -> EngineFacts:
        """Return what hello says."""
        return self._facts

    def submit(self, work: Work) -> None:
        """Take a leg."""
        if not self._refuses_ids(work):
            self._constraints.begin(work)
            self._do(self._scheduler.submit(work, self._clock.now_s()))

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        """Take the decode nodes that may be sent to."""
        # One that has not handed out an admission key yet would turn a connection away.
        open_ones = [peer for peer in peers if peer.kv_address and peer.kv_admission_key]
        self._corridor.set_peers(
            {peer.incarnation: peer.kv_address for peer in open_ones},
            {peer.incarnation: peer.kv_admission_key for peer in open_ones},
        )

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

    def gauges(self) -> dict[str, float]:
        """Return the role's gauges."""
        own = {
            "prefill.waiting": self._scheduler.num_waiting,
            "prefill.running": self._scheduler.num_running,
            "prefill.waiting_tokens": self._scheduler.num_waiting_tokens,
        }
        return {name: float(value) for name, value in own.items()} | super().gauges()

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case OpenTransfer(work):
                self._corridor.open(transfer_spec(work, work.decode))
            case BindBlocks(transfer_id, lease):
                self._bound.bind(transfer_id, lease)
            case CommitTransfer(transfer_id, tokens, durations_s):
                self._corridor.commit(transfer_id, tokens, durations_s)
            case AbortTransfer(transfer_id, reason, finished, is_busy):
                self._corridor.abort(transfer_id, reason, finished, is_busy)
            case ReportPromptScores(leg, start, scores):
                self._legs.prompt_scores(leg, start, scores)
            case ReportFirstToken(leg, tokens, durations_s):
                self._legs.first_token(leg, tokens, 0, durations_s)
            case ReportEnd() | ReportRelease():
                self._report(instruction)

    def _on_corridor(self, event: kv.SendEvent) -> None:
        now_s, scheduler = self._clock.now_s(), self._scheduler
        match event:
            case kv.PeerUp() | kv.PeerDown() | kv.PeerRefused():
                self._on_peer(event)
            case kv.Granted(transfer_id, _):
                self._do(scheduler.granted(transfer_id, now_s))
            case kv.Acked(transfer_id, stats):
                self._transfers.worked()
                self._do(scheduler.acked(transfer_id, stats.exposed_s, stats.stalled_s, now_s))
            case kv.SendFailed(transfer_id, reason, detail, busy):
                self._transfer_failed(reason, busy=busy)
                self._do(scheduler.transfer_failed(transfer_id, reason, detail, busy=busy, now_s=now_s))
            case kv.SendClosed(transfer_id, stats):
                self._bound.unbind(transfer_id)
                sent = (stats.kv_bytes, stats.num_frames, stats.pack_s)
                self._do(scheduler.transfer_closed(transfer_id, *sent, now_s))
            case kv.CorridorBroken(reason):
                self._break(reason)
