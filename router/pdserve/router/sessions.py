"""The shell around all sessions: executes their instructions and owns their timers; those that wait for nodes are in `placing`.

Everything runs on the event loop's thread and returns at once; what sessions decide is in `session`.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable

from pdserve.core.api_keys import Caller
from pdserve.core.clock import Clock
from pdserve.core.errors import InternalError, PdserveError, SlowReader
from pdserve.core.ids import Incarnation, new_transfer_id
from pdserve.core.work import LegOutcome
from pdserve.router import pb_nodes
from pdserve.router.admission import Admission
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
from pdserve.router.facts import SessionFacts
from pdserve.router.family import Family
from pdserve.router.instructions import (
    Answer,
    AskPlacement,
    CancelLeg,
    Close,
    Deliver,
    DeliverPrompt,
    Fail,
    Finish,
    Fork,
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
from pdserve.router.open_session import OpenSession, session_gauges
from pdserve.router.output import OutputText
from pdserve.router.patience import Patience, SessionLimits
from pdserve.router.pb import SessionRow
from pdserve.router.placement import PlacementPolicy
from pdserve.router.placing import MIN_TIMER_S, Placing
from pdserve.router.request import ValidRequest
from pdserve.router.sequence import EndRules, Sequence
from pdserve.router.sequences import Sequences
from pdserve.router.session import Session
from pdserve.router.timeline import TimelineRecorder

PEER_LOST = "peer_lost"
"""A node's reason for a leg whose other node is gone."""


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
        self._membership, self._admission = membership, admission
        self._limits, self._clock, self._max_unread_bytes = limits, clock, max_unread_bytes
        self._open: dict[int, OpenSession] = {}
        self._placing = Placing(membership, policy, clock, self)
        self._next_id = 1
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
        return self._placing.num_new

    def open(
        self,
        request: ValidRequest,
        prompt_ids: tuple[int, ...],
        max_tokens: int,
        outputs: Iterable[OutputText],
        timeline: TimelineRecorder,
        received_s: float,
        deadline_s: float | None,
        caller: Caller,
    ) -> OpenSession:
        """Open a session for a request that was admitted, one output per sequence; it leaves admission when it is closed."""
        session_id, self._next_id = self._next_id, self._next_id + 1
        rules = EndRules(max_tokens, request.stop_token_ids, request.ignore_eos)
        session = Session(
            SessionFacts(session_id, prompt_ids, max_tokens, received_s, deadline_s, request.prompt_logprobs, caller),
            Sequences({index: Sequence(rules, output) for index, output in enumerate(outputs)}),
            Patience(self._limits, received_s),
            timeline,
            new_transfer_id,
        )
        mailbox = Mailbox(self._max_unread_bytes if request.stream else None)
        entry = self._enter(request, session, Family(), mailbox)
        entry.journal.admitted()
        self._begin(entry, session.begin)
        self._placing.pump()
        return entry

    def client_left(self, entry: OpenSession, error: PdserveError | None = None) -> None:
        """Say that nobody reads the answer any more, or, with an error, that it is given up. Harmless when it is complete."""
        entry.mailbox.discard()
        for member in self._members(entry.family):
            if error is not None:
                self._tell(member, Aborted(error))
            self._tell(member, ClientLeft())

    def leg_event(self, session_id: int, event: LegEvent) -> None:
        """Take what a node said of a leg."""
        if isinstance(event, FirstToken | Adopted | Tokens):
            self._membership.leg_started(event.node, (session_id, event.attempt))
        elif isinstance(event, LegEnded | LegReleased):
            self._membership.leg_over(event.node, (session_id, event.attempt))
        entry = self._open.get(session_id)
        if entry is None:
            self.num_stray_events += 1
            return
        if isinstance(event, LegEnded):
            entry.journal.leg_ended(event)
            self._heed_loss(entry, event)
        self._tell(entry, event)
        if len(self._placing) and isinstance(event, FirstToken | LegReleased):
            self._placing.pump_soon()

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
        """Place those that wait. Called whenever nodes may have become free."""
        self._placing.pump()

    def place(self, session_id: int, event: Placed | PlacementRefused) -> None:
        """Answer a session's question for nodes."""
        entry = self._open.get(session_id)
        if entry is not None:
            self._tell(entry, event)

    def num_resuming(self) -> int:
        """Return how many sessions' tokens are being computed anew."""
        return sum(
            entry.session.attempt > 1 and entry.session.state in (SessionState.PLACED, SessionState.PREFILLING)
            for entry in self._open.values()
        )

    # ---- views

    def gauges(self) -> dict[str, float]:
        """Return sessions by state, what they hold, and how requests ended."""
        return session_gauges(self._open.values()) | {
            "admitted": float(self._admission.num_open),
            "waiting": float(len(self._placing)),
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
        return [entry.row(now_s) for entry in itertools.islice(self._open.values(), limit)]

    def check_invariants(self) -> list[str]:
        """Return what is wrong; empty when all is well."""
        faults = [fault for entry in self._open.values() for fault in entry.session.check_invariants()]
        num_answers = sum({id(entry.family): entry.request.n for entry in self._open.values()}.values())
        if self._admission.num_open < num_answers:
            faults.append(f"{num_answers} answers are open, {self._admission.num_open} were admitted")
        waiting = [session_id for session_id in self._placing.session_ids if session_id not in self._open]
        faults += [f"{session_id} waits and is not open" for session_id in waiting]
        return faults

    # ---- the engine room

    def _enter(self, request: ValidRequest, session: Session, family: Family, mailbox: Mailbox) -> OpenSession:
        family.join(session)
        entry = OpenSession(request, session, family, mailbox, Journal(request.label, session, family))
        self._open[session.facts.session_id] = entry
        return entry

    def _begin(self, entry: OpenSession, begin: Callable[[float], list[Instruction]]) -> None:
        """Execute a session's first instructions; events that they cause come after them."""
        entry.is_handling = True
        self._execute(entry, begin(self._clock.now_s()))
        entry.is_handling = False
        self._work_off(entry)

    def _fork(self, entry: OpenSession, parts: Iterable[Sequences]) -> None:
        """Let each part go on as a session of its own."""
        for part in parts:
            session_id, self._next_id = self._next_id, self._next_id + 1
            child = entry.session.child(part, session_id)
            entry.journal.forked(child)
            self._begin(self._enter(entry.request, child, entry.family, entry.mailbox), child.resume)

    def _members(self, family: Family) -> list[OpenSession]:
        """Return the sessions of a request that are still open."""
        numbers = [session.facts.session_id for session in family.sessions]
        return [self._open[number] for number in numbers if number in self._open]

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
            fault = f"a fault of the router: {type(error).__name__}"
            told = InternalError(fault, hint="see the router's log", operators_hint=str(error))
            self._break(entry, error if isinstance(error, InternalError) else told)
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
                    self._placing.withdraw(entry.session_id)
                case Submit():
                    self._submit(entry, instruction)
                case CancelLeg(node, attempt, reason, sequences):
                    message = pb_nodes.cancel_message(entry.session_id, attempt, reason, sequences)
                    self._membership.send(node, [message])
                case DeliverPrompt(tokens):
                    entry.mailbox.put_prompt(tokens)
                case Deliver(gain):
                    if not entry.mailbox.put(gain):
                        entry.events.append(Aborted(self._slow_reader()))
                case Finish():
                    entry.mailbox.finish(instruction)
                case Answer():
                    self._answer(entry, instruction)
                case Fail(error):
                    self._fail(entry, error)
                case Fork(parts):
                    self._fork(entry, parts)
                case LegAbandoned(node, attempt):
                    self.num_abandoned_legs += 1
                    entry.journal.abandoned(node, attempt)
                case Close():
                    self._close(entry)

    def _ask_placement(self, entry: OpenSession, query: PlacementQuery) -> None:
        if entry.session.attempt:
            entry.journal.resuming()
        self._placing.ask(query)

    def _answer(self, entry: OpenSession, part: Answer) -> None:
        """Close the request's answer with its last part."""
        answer = entry.family.answered(entry.session, part)
        if answer is None:
            return
        entry.family.processes = entry.submitted_to
        entry.mailbox.close(answer)

    def _fail(self, entry: OpenSession, error: PdserveError) -> None:
        """A part that fails fails the request: the others end with it."""
        if not entry.family.failed(error):
            return
        entry.mailbox.close(Fail(error))
        for member in self._members(entry.family):
            if member is not entry:
                self._tell(member, Aborted(error))

    def _submit(self, entry: OpenSession, submit: Submit) -> None:
        """Tell both nodes at once, decode first: an OPEN that overtakes its submit would have to be parked."""
        entry.journal.placed(submit)
        hellos = [self._membership.hello(node) for node in (submit.prefill, submit.decode) if node is not None]
        entry.submitted_to = tuple(hello.process for hello in hellos if hello is not None)
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
            min_tokens=request.min_tokens,
            top_logprobs=request.top_logprobs,
        )
        num_tokens = len(facts.prompt_ids) + len(submit.output_ids)
        block_sizes = {hello.incarnation: hello.process.block_size for hello in hellos if hello is not None}
        messages = pb_nodes.submit_messages(wire, submit)
        for node in (submit.decode, submit.prefill):
            if node is None:
                continue
            if not self._membership.send(node, messages):
                entry.events.append(NodeLost(node, "the stream is gone"))
                return
            num_more = (submit.num_sequences - 1) * block_sizes.get(node, 0) if node == submit.decode else 0
            self._membership.placed(node, (facts.session_id, submit.attempt), num_tokens + num_more)
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
        family = entry.family
        if family.is_answered and not family.is_noted:
            family.is_noted = True
            self._num_ended[family.state] += 1
            entry.journal.ended()

    def _slow_reader(self) -> PdserveError:
        return SlowReader(
            f"the client left more than {self._max_unread_bytes} bytes unread", hint="read the stream faster"
        )

    def _break(self, entry: OpenSession, error: InternalError) -> None:
        """A fault of ours in one session must not touch the others: fail it, cancel its legs, forget it."""
        self._placing.withdraw(entry.session_id)
        for leg in entry.session.legs:
            if not leg.is_closed:
                message = pb_nodes.cancel_message(entry.session_id, leg.attempt, "internal error")
                self._membership.send(leg.node, [message])
        entry.session.give_up(self._clock.now_s())
        self._fail(entry, error)
        self._note_end(entry)
        self._close(entry)

    def _close(self, entry: OpenSession) -> None:
        if self._open.pop(entry.session_id, None) is None:
            return
        if entry.timer is not None:
            entry.timer.cancel()
        if not self._members(entry.family):
            self._admission.leave(self._clock.now_s(), entry.request.n)
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


def _nobody_waits() -> None:
    """Stand in until somebody waits for the last session's end."""
