"""The shell around all sessions: executes their instructions, owns their timers and the line of those that wait for nodes.

Everything runs on the event loop's thread and returns at once; what sessions decide is in `session`.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.clock import Clock
from pdserve.core.errors import InternalError, PdserveError, SlowReader
from pdserve.core.ids import Incarnation, new_transfer_id
from pdserve.core.work import LegOutcome
from pdserve.router import pb_nodes
from pdserve.router.admission import Admission, WaitingLine
from pdserve.router.events import (
    Aborted,
    Adopted,
    ClientLeft,
    Event,
    FirstToken,
    LegEnded,
    LegEvent,
    LegReleased,
    NodeLost,
    Placed,
    PlacementRefused,
    Submitted,
    Tick,
    Tokens,
)
from pdserve.router.instructions import (
    Answer,
    AskPlacement,
    CancelLeg,
    Close,
    Deliver,
    DeliverPrompt,
    Fail,
    Finish,
    Instruction,
    LegAbandoned,
    PlacementQuery,
    Submit,
    WithdrawPlacement,
)
from pdserve.router.journal import Journal
from pdserve.router.lifecycle import SessionState
from pdserve.router.mailbox import Mailbox
from pdserve.router.membership import Membership
from pdserve.router.nodes import NodeLoad
from pdserve.router.output import OutputText
from pdserve.router.patience import SessionLimits
from pdserve.router.pb import SessionRow
from pdserve.router.placement import Busy, Pair, PlacementPolicy, place
from pdserve.router.request import ValidRequest
from pdserve.router.sequence import EndRules, Sequence
from pdserve.router.session import Session, SessionFacts
from pdserve.router.timeline import TimelineRecorder

MIN_TIMER_S = 0.001
RESUMES_PER_NODE = 8
"""Sessions per prefill node that are computed anew at once: the loss of a full node must not flood the others."""
PEER_LOST = "peer_lost"
"""A node's reason for a leg whose other node is gone."""


@dataclass
class OpenSession:
    """A session with what its shell needs: the request, the client's mailbox, the timer, events that wait their turn."""

    request: ValidRequest
    session: Session
    mailbox: Mailbox
    journal: Journal
    processes: tuple[ProcessInfo, ...] = ()
    """The nodes of the last attempt, as they were when it was submitted."""
    error: PdserveError | None = None
    is_ended: bool = False
    timer: asyncio.TimerHandle | None = None
    due_s: float | None = None
    events: deque[Event] = field(default_factory=deque)
    is_handling: bool = False

    @property
    def session_id(self) -> int:
        """The router's number of the session."""
        return self.session.facts.session_id


class Sessions:
    """All open sessions of a router."""

    def __init__(
        self,
        membership: Membership,
        admission: Admission,
        policy: PlacementPolicy,
        limits: SessionLimits,
        clock: Clock,
        max_unread_bytes: int,
    ) -> None:
        self._membership, self._admission, self._policy = membership, admission, policy
        self._limits, self._clock, self._max_unread_bytes = limits, clock, max_unread_bytes
        self._open: dict[int, OpenSession] = {}
        self._line = WaitingLine()
        self._pump_timer: asyncio.TimerHandle | None = None
        self._next_id = 1
        self._is_pumping = False
        self._is_pump_due = False
        self._num_ended: Counter[SessionState] = Counter()
        self.num_stray_events = 0
        self.num_abandoned_legs = 0
        self.on_idle: Callable[[], None] = _nobody_waits
        membership.on_change = self.pump
        membership.on_lost = self.node_lost

    def __len__(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for nodes and were never served."""
        return self._line.num_new

    def open(
        self,
        request: ValidRequest,
        prompt_ids: tuple[int, ...],
        max_tokens: int,
        output: OutputText,
        timeline: TimelineRecorder,
        received_s: float,
        deadline_s: float | None,
    ) -> OpenSession:
        """Open a session for a request that was admitted; it leaves admission when it closes."""
        session_id, self._next_id = self._next_id, self._next_id + 1
        rules = EndRules(max_tokens, request.stop_token_ids, request.ignore_eos)
        session = Session(
            SessionFacts(session_id, prompt_ids, max_tokens, received_s, deadline_s),
            Sequence(rules, output),
            self._limits,
            timeline,
            new_transfer_id,
        )
        mailbox = Mailbox(self._max_unread_bytes if request.stream else None)
        entry = OpenSession(request, session, mailbox, Journal(request.label, session))
        entry.journal.admitted()
        self._open[session_id] = entry
        entry.is_handling = True
        self._execute(entry, session.begin(self._clock.now_s()))
        entry.is_handling = False
        self._work_off(entry)
        self.pump()
        return entry

    def client_left(self, entry: OpenSession) -> None:
        """Say that nobody reads the answer any more. Harmless when it is complete."""
        entry.mailbox.discard()
        self._tell(entry, ClientLeft())

    def leg_event(self, session_id: int, event: LegEvent) -> None:
        """Take what a node said of a leg."""
        if isinstance(event, FirstToken | Adopted | Tokens | LegEnded | LegReleased):
            self._membership.settled(event.node, (session_id, event.attempt))
        entry = self._open.get(session_id)
        if entry is None:
            self.num_stray_events += 1
            return
        if isinstance(event, LegEnded):
            entry.journal.leg_ended(event)
            self._heed_loss(entry, event)
        self._tell(entry, event)
        if len(self._line) and isinstance(event, FirstToken | LegReleased):
            self._pump_soon()

    def node_lost(self, node: Incarnation, reason: str) -> None:
        """Tell every session that a node's stream broke."""
        for entry in list(self._open.values()):
            if any(leg.node == node and not leg.is_closed for leg in entry.session.legs):
                self._tell(entry, NodeLost(node, reason))

    def abort_all(self, make_error: Callable[[], PdserveError]) -> None:
        """End every session with an error of its own."""
        for entry in list(self._open.values()):
            self._tell(entry, Aborted(make_error()))

    def pump(self) -> None:
        """Place those that wait: resumes first, each by age. Called whenever nodes may have become free."""
        if self._is_pumping:
            return
        self._is_pumping = True
        self._is_pump_due = False
        try:
            self._place_waiting()
        finally:
            self._is_pumping = False
        self._arm_pump()

    # ---- views

    def gauges(self) -> dict[str, float]:
        """Return sessions by state and what they hold."""
        counts = {f"sessions.{state.value}": 0.0 for state in SessionState}
        for entry in self._open.values():
            counts[f"sessions.{entry.session.state.value}"] += 1
        return counts | {
            "sessions": float(len(self._open)),
            "admitted": float(self._admission.num_open),
            "waiting": float(len(self._line)),
            "legs_open": float(sum(entry.session.num_open_legs for entry in self._open.values())),
            "mailbox_bytes": float(sum(entry.mailbox.num_bytes for entry in self._open.values())),
            "served_total": float(self._num_ended[SessionState.FINISHED]),
            "failed_total": float(self._num_ended[SessionState.FAILED]),
            "cancelled_total": float(self._num_ended[SessionState.CANCELLED]),
            "refused_total": float(self._admission.num_refused),
            "stray_events_total": float(
                self.num_stray_events + sum(entry.session.num_stray_events for entry in self._open.values())
            ),
            "abandoned_legs_total": float(self.num_abandoned_legs),
        }

    def rows(self, limit: int) -> list[SessionRow]:
        """Return up to `limit` open sessions, oldest first."""
        now_s = self._clock.now_s()
        return [
            SessionRow(
                entry.session_id,
                entry.request.label,
                entry.session.state.name,
                entry.session.attempt,
                now_s - entry.session.facts.received_s,
                len(entry.session.sequence.token_ids),
            )
            for entry in list(self._open.values())[:limit]
        ]

    def check_invariants(self) -> list[str]:
        """Return what is wrong; empty when all is well."""
        faults = [fault for entry in self._open.values() for fault in entry.session.check_invariants()]
        if self._admission.num_open < len(self._open):
            faults.append(f"{len(self._open)} sessions are open, {self._admission.num_open} were admitted")
        faults += [
            f"{query.session_id} waits and is not open"
            for query in self._line.all()
            if query.session_id not in self._open
        ]
        return faults

    # ---- the engine room

    def _tell(self, entry: OpenSession, event: Event) -> None:
        """Queue an event; events that an instruction causes are handled after it, never inside it."""
        entry.events.append(event)
        if not entry.is_handling:
            self._work_off(entry)

    def _work_off(self, entry: OpenSession) -> None:
        entry.is_handling = True
        try:
            while entry.events:
                event = entry.events.popleft()
                entry.journal.happened(event)
                self._execute(entry, entry.session.handle(event, self._clock.now_s()))
        except Exception as error:  # noqa: BLE001 - a fault in one session must not end the router for all others
            entry.journal.broke()
            fault = f"a fault of the router: {type(error).__name__}: {error}"
            self._break(entry, error if isinstance(error, InternalError) else InternalError(fault))
        finally:
            entry.is_handling = False
        if entry.session.is_answered:
            self._note_end(entry)
        self._arm_timer(entry)

    def _execute(self, entry: OpenSession, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case AskPlacement(query):
                    self._ask_placement(entry, query)
                case WithdrawPlacement():
                    self._line.leave(entry.session_id)
                case Submit():
                    self._submit(entry, instruction)
                case CancelLeg(node, attempt, reason):
                    self._membership.send(node, [pb_nodes.cancel_message(entry.session_id, attempt, reason)])
                case DeliverPrompt(tokens):
                    entry.mailbox.put_prompt(tokens)
                case Deliver(gain):
                    if not entry.mailbox.put(gain):
                        entry.events.append(Aborted(self._slow_reader()))
                case Finish():
                    entry.mailbox.finish(instruction)
                case Answer():
                    entry.mailbox.close(instruction)
                case Fail(error):
                    entry.error = error
                    entry.mailbox.close(instruction)
                case LegAbandoned(node, attempt):
                    self.num_abandoned_legs += 1
                    entry.journal.abandoned(node, attempt)
                case Close():
                    self._close(entry)

    def _ask_placement(self, entry: OpenSession, query: PlacementQuery) -> None:
        if entry.session.attempt:
            entry.journal.resuming()
        self._line.join(query)
        self._pump_soon()

    def _pump_soon(self) -> None:
        """Pump once, however many events of this turn of the loop ask for it."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)

    def _place_waiting(self) -> None:
        loads = self._membership.loads()
        room = RESUMES_PER_NODE * sum(load.role is Role.PREFILL for load in loads) - self._num_resuming()
        for query in self._line.due(self._clock.now_s(), room):
            if self._try_place(query, loads):
                loads = self._membership.loads()

    def _num_resuming(self) -> int:
        """Sessions whose tokens are being computed anew."""
        return sum(
            entry.session.attempt > 1 and entry.session.state in (SessionState.PLACED, SessionState.PREFILLING)
            for entry in self._open.values()
        )

    def _try_place(self, query: PlacementQuery, loads: list[NodeLoad]) -> bool:
        """Answer a question if it can be answered now; return whether nodes were given work."""
        entry = self._open.get(query.session_id)
        found = place(query, loads, self._policy)
        if entry is None or isinstance(found, Busy):
            return False
        if isinstance(found, Pair):
            self._line.leave(query.session_id)
            eos = self._membership.eos_token_ids(found.prefill)
            self._tell(entry, Placed(found.prefill, found.decode, found.identity, eos))
            return True
        if found.is_final or not query.is_resume:
            self._line.leave(query.session_id)
            found.error.hint = found.error.hint or self._membership.why_empty()
            self._tell(entry, PlacementRefused(found.error))
        return False

    def _submit(self, entry: OpenSession, submit: Submit) -> None:
        """Tell both nodes at once, decode first: an OPEN that overtakes its submit would have to be parked."""
        entry.journal.placed(submit)
        hellos = [self._membership.hello(node) for node in (submit.prefill, submit.decode) if node is not None]
        entry.processes = tuple(hello.process for hello in hellos if hello is not None)
        now_s = self._clock.now_s()
        facts, request = entry.session.facts, entry.request
        wire = pb_nodes.SubmitFacts(
            session_id=facts.session_id,
            label=request.label,
            prompt_ids=facts.prompt_ids,
            sampling=request.sampling,
            max_tokens=facts.max_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            deadline_s=0.0 if facts.deadline_s is None else max(0.001, facts.deadline_s - now_s),
            age_s=max(0.0, now_s - facts.received_s),
        )
        num_tokens = len(facts.prompt_ids) + len(submit.output_ids)
        messages = pb_nodes.submit_messages(wire, submit)
        for node in (submit.decode, submit.prefill):
            if node is None:
                continue
            if not self._membership.send(node, messages):
                entry.events.append(NodeLost(node, "the stream is gone"))
                return
            self._membership.placed(node, (facts.session_id, submit.attempt), num_tokens)
        entry.events.append(Submitted(submit.attempt))

    def _heed_loss(self, entry: OpenSession, event: LegEnded) -> None:
        """A node may know of its peer's loss before this router's own stream breaks: nothing new goes there meanwhile."""
        if event.outcome is not LegOutcome.FAILED or event.reason != PEER_LOST:
            return
        for leg in entry.session.legs:
            if leg.attempt == event.attempt and leg.node != event.node and not leg.is_closed:
                self._membership.doubt(leg.node, self._clock.now_s())

    def _note_end(self, entry: OpenSession) -> None:
        """Log and count the end of a request, once."""
        if entry.is_ended:
            return
        entry.is_ended = True
        is_fault = entry.error is not None or not entry.session.life.is_terminal
        self._num_ended[SessionState.FAILED if is_fault else entry.session.state] += 1
        entry.journal.ended(entry.error)

    def _slow_reader(self) -> PdserveError:
        return SlowReader(
            f"the client left more than {self._max_unread_bytes} bytes unread", hint="read the stream faster"
        )

    def _break(self, entry: OpenSession, error: InternalError) -> None:
        """A fault of ours in one session must not touch the others: fail it, cancel its legs, forget it."""
        self._line.leave(entry.session_id)
        for leg in entry.session.legs:
            if not leg.is_closed:
                message = pb_nodes.cancel_message(entry.session_id, leg.attempt, "internal error")
                self._membership.send(leg.node, [message])
        entry.error = error
        entry.mailbox.close(Fail(error))
        self._note_end(entry)
        self._close(entry)

    def _close(self, entry: OpenSession) -> None:
        if self._open.pop(entry.session_id, None) is None:
            return
        if entry.timer is not None:
            entry.timer.cancel()
        self._admission.leave(self._clock.now_s())
        self.num_stray_events += entry.session.num_stray_events
        if not self._open:
            self.on_idle()

    def _arm_timer(self, entry: OpenSession) -> None:
        due_s = entry.session.next_timer_s if entry.session_id in self._open else None
        if entry.timer is not None:
            if due_s == entry.due_s and entry.timer.when() > asyncio.get_running_loop().time():
                return  # most events change no timer
            entry.timer.cancel()
            entry.timer = None
        entry.due_s = due_s
        if due_s is None:
            return
        delay_s = max(MIN_TIMER_S, due_s - self._clock.now_s())
        entry.timer = asyncio.get_running_loop().call_later(delay_s, self._tell, entry, Tick())

    def _arm_pump(self) -> None:
        if self._pump_timer is not None:
            self._pump_timer.cancel()
            self._pump_timer = None
        now_s = self._clock.now_s()
        due_s = self._line.next_due_s(now_s)
        if due_s is not None:
            delay_s = max(MIN_TIMER_S, due_s - now_s)
            self._pump_timer = asyncio.get_running_loop().call_later(delay_s, self.pump)


def _nobody_waits() -> None:
    """Stand in until somebody waits for the last session's end."""
