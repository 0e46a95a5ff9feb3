"""A session: one request from admission until the client is answered and every leg is released. Sans-IO.

Events and the time go in, instructions come out. Before `adopted`, the failure of either leg ends the attempt on both nodes;
after it only the decode leg matters. An attempt that ended is followed by another, from the tokens accepted so far.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.core.build import Role
from pdserve.core.errors import DeadlineExceeded, InternalError, PdserveError
from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.lifecycle import LifeCycle
from pdserve.core.work import LegOutcome, SampledToken
from pdserve.router.events import (
    Aborted,
    Adopted,
    ClientLeft,
    Event,
    FirstToken,
    Granted,
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
    Fail,
    Finish,
    Instruction,
    LegAbandoned,
    PlacementQuery,
    Submit,
    WithdrawPlacement,
)
from pdserve.router.legs import Leg, LegMove
from pdserve.router.lifecycle import IN_ATTEMPT, SESSION_TABLE, SessionMove, SessionState
from pdserve.router.output import Gain
from pdserve.router.patience import Patience, SessionLimits
from pdserve.router.sequence import Sequence
from pdserve.router.timeline import StageName, TimelineRecorder

SUMMARY_GRACE_S = 0.1
"""Longest that a complete answer waits for the nodes' own durations before its summary is sent."""
RELEASE_WAIT_S = 120.0
"""Longest that an answered session waits for `released`, a backstop: a node releases what is cancelled within a step."""
DEADLINE_SLACK_S = 0.25
"""A node that ends a leg this close to the deadline ended it for the deadline."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What does not change during a session. Times are on the router's monotonic clock."""

    session_id: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    received_s: float
    deadline_s: float | None


class Session:
    """One request's machine. `handle` never raises for anything that the world can cause."""

    def __init__(
        self,
        facts: SessionFacts,
        sequence: Sequence,
        limits: SessionLimits,
        timeline: TimelineRecorder,
        new_transfer_id: Callable[[], TransferId],
    ) -> None:
        self.facts, self.sequence = facts, sequence
        self._timeline, self._new_transfer_id = timeline, new_transfer_id
        self._patience = Patience(limits, facts.received_s)
        self.life = LifeCycle(SESSION_TABLE, f"session {facts.session_id}", facts.received_s)
        self.legs: list[Leg] = []
        self.attempt = 0
        self.num_stray_events = 0
        self._placed: Placed | None = None
        self._prefer: Incarnation | None = None
        self._num_cached_tokens: int | None = None
        self._handover_names: frozenset[str] = frozenset()
        self._answer_due_s: float | None = None
        self._answered_s: float | None = None
        self._is_closed = False
        self._out: list[Instruction] = []

    @property
    def state(self) -> SessionState:
        """Where the session stands."""
        return self.life.state

    @property
    def is_answered(self) -> bool:
        """Whether the client has its summary or error, or is gone."""
        return self._answered_s is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, seconds; None without one."""
        return self._timeline.ttft_s

    @property
    def e2el_s(self) -> float | None:
        """Time to the answer, seconds; None before it."""
        return None if self._answered_s is None else self._answered_s - self.facts.received_s

    @property
    def num_open_legs(self) -> int:
        """Legs that are neither released nor lost."""
        return sum(not leg.is_closed for leg in self.legs)

    @property
    def last_cause(self) -> str:
        """Why the last attempt ended; empty if none did."""
        return self._patience.last_cause

    @property
    def next_timer_s(self) -> float | None:
        """When a Tick is due next, or None."""
        times: list[float | None] = []
        if self._is_closed:
            return None
        if self._answered_s is not None:
            times.append(self._answered_s + RELEASE_WAIT_S)
        else:
            times += [self.facts.deadline_s, self._answer_due_s, self._wait_ends_s]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def begin(self, now_s: float) -> list[Instruction]:
        """Start: ask for the first placement."""
        self._timeline.enter(StageName.PLACEMENT, 1, now_s)
        self._ask_placement(now_s)
        return self._take_out(now_s)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event and return what is to be done, in order."""
        match event:
            case Placed():
                self._on_placed(event, now_s)
            case PlacementRefused(error):
                if self.state is SessionState.ADMITTED:
                    self._fail(self._patience.refusal_error(error), now_s)
            case Submitted(attempt):
                self._on_submitted(attempt, now_s)
            case NodeLost(node, reason):
                self._on_node_lost(node, reason, now_s)
            case ClientLeft():
                self._on_client_left(now_s)
            case Aborted(error):
                self._fail(error, now_s)
            case Tick():
                self._on_tick(now_s)
            case _:
                self._on_leg_event(event, now_s)
        return self._take_out(now_s)

    def check_invariants(self) -> list[str]:
        """Return what is wrong; empty when all is well."""
        faults = []
        for leg in self.legs:
            is_abandoned = leg.attempt != self.attempt or self.state not in (*IN_ATTEMPT, SessionState.FINISHED)
            if leg.is_running and is_abandoned and not leg.is_cancelled:
                faults.append(f"{leg.life.subject} runs for nobody; {leg.life.tell()}")
        if self._is_closed and (self.num_open_legs or not self.is_answered):
            faults.append(f"{self.life.subject} is closed with open legs or without an answer; {self.life.tell()}")
        if (self.sequence.end is not None) != (self.state is SessionState.FINISHED) and not self.life.is_terminal:
            faults.append(f"{self.life.subject}: the sequence's end and the state disagree; {self.life.tell()}")
        return faults

    # ---- placement

    def _ask_placement(self, now_s: float) -> None:
        self._out.append(
            AskPlacement(
                PlacementQuery(
                    session_id=self.facts.session_id,
                    num_tokens=len(self.facts.prompt_ids) + len(self.sequence.token_ids),
                    max_len=len(self.facts.prompt_ids) + self.facts.max_tokens,
                    needs_decode=self.sequence.num_remaining > 1,
                    is_resume=self._is_resume,
                    arrived_s=self.facts.received_s,
                    not_before_s=now_s + self._patience.backoff_s,
                    identity=self._placed.identity if self._placed else None,
                    exclude=self._patience.excluded,
                    prefer=self._prefer,
                )
            )
        )

    @property
    def _is_resume(self) -> bool:
        return bool(self.sequence.token_ids) or self._patience.num_failures > 0

    @property
    def _wait_ends_s(self) -> float | None:
        if self.state is not SessionState.ADMITTED:
            return None
        return self._patience.wait_ends_s(is_resume=self._is_resume)

    def _on_placed(self, placed: Placed, now_s: float) -> None:
        if not self.life.advance(SessionMove.PLACE, now_s):
            return
        self.attempt += 1
        self._placed = placed
        self._handover_names = frozenset()
        self.legs.append(Leg(Role.PREFILL, placed.prefill, self.attempt, now_s))
        if placed.decode is not None:
            self.legs.append(Leg(Role.DECODE, placed.decode, self.attempt, now_s))
        self._out.append(
            Submit(
                attempt=self.attempt,
                prefill=placed.prefill,
                decode=placed.decode,
                transfer_id=None if placed.decode is None else self._new_transfer_id(),
                output_ids=tuple(self.sequence.token_ids),
            )
        )

    def _on_submitted(self, attempt: int, now_s: float) -> None:
        if attempt == self.attempt and self.life.advance(SessionMove.SUBMIT, now_s):
            self._timeline.enter(StageName.PREFILL, attempt, now_s)

    # ---- what nodes say

    def _on_leg_event(self, event: LegEvent, now_s: float) -> None:
        leg = next((leg for leg in self.legs if leg.node == event.node and leg.attempt == event.attempt), None)
        if leg is None or leg.is_closed:
            self.num_stray_events += 1
            return
        is_current = leg.attempt == self.attempt and self.state in IN_ATTEMPT
        match event:
            case LegEnded():
                self._on_ended(leg, event, is_current, now_s)
            case LegReleased():
                self._on_released(leg, event, is_current, now_s)
            case FirstToken() if leg.role is Role.PREFILL and leg.attempt == self.attempt:
                self._on_first_token(event, is_current, now_s)
            case Adopted() if leg.role is Role.DECODE and is_current:
                self._on_adopted(event, now_s)
            case Tokens() if leg.role is Role.DECODE and is_current:
                self._adopt(now_s)
                self._accept(event.tokens, now_s)
            case Granted():
                pass
            case _:
                self.num_stray_events += 1

    def _on_first_token(self, event: FirstToken, is_current: bool, now_s: float) -> None:
        if self._num_cached_tokens is None:
            self._num_cached_tokens = min(event.num_cached_tokens, len(self.facts.prompt_ids))
        self._timeline.nest(StageName.PREFILL, event.attempt, event.durations_s)
        if not is_current:
            return
        is_first = self.life.advance(SessionMove.FIRST_TOKEN, now_s)
        self._accept(event.tokens, now_s)
        if is_first and self.state is SessionState.HANDING_OVER:
            self._timeline.enter(StageName.HANDOVER, self.attempt, now_s)

    def _on_adopted(self, event: Adopted, now_s: float) -> None:
        self._adopt(now_s)
        self._handover_names = frozenset(event.durations_s)
        self._timeline.nest(StageName.HANDOVER, event.attempt, event.durations_s)
        self._timeline.overlap(event.durations_s)
        self._accept(event.tokens, now_s)

    def _adopt(self, now_s: float) -> None:
        """Pass the commit point. Tokens of the decode node prove it as well as its word."""
        had_first_token = self.state is SessionState.HANDING_OVER
        if self.life.advance(SessionMove.ADOPT, now_s):
            if not had_first_token:
                self._timeline.enter(StageName.HANDOVER, self.attempt, now_s)
            self._timeline.enter(StageName.DECODE, self.attempt, now_s)

    def _accept(self, tokens: tuple[SampledToken, ...], now_s: float) -> None:
        before = len(self.sequence.token_ids)
        shown = self.sequence.accept(tokens, self._placed.eos_token_ids if self._placed else frozenset())
        if len(self.sequence.token_ids) > before:
            self._timeline.token(now_s)
            self._patience.progressed()
        if shown:
            self._out.append(Deliver(Gain(0, shown)))
        end = self.sequence.end
        if end is not None and self.life.advance(SessionMove.COMPLETE, now_s):
            self._timeline.enter(StageName.ANSWER, self.attempt, now_s)
            self._answer_due_s = now_s + SUMMARY_GRACE_S
            self._out.append(Finish(0, end.reason, end.stop, end.stop_token_id))
            if not end.by_node:
                self._cancel_legs("the answer is complete")

    def _on_ended(self, leg: Leg, event: LegEnded, is_current: bool, now_s: float) -> None:
        if not leg.life.advance(LegMove.END, now_s):
            return
        leg.outcome = event.outcome
        if not is_current or not self._matters(leg):
            return
        if event.outcome is LegOutcome.REFUSED:
            self._patience.refused(event)
        is_adopted = self.state is SessionState.DECODING
        is_alone = self._placed is not None and self._placed.decode is None
        if event.outcome is not LegOutcome.FINISHED:
            self._end_attempt(event.outcome, event.reason or event.outcome.name.lower(), now_s)
        elif is_adopted or is_alone:
            self._end_attempt(LegOutcome.FAILED, f"{leg.role.label}_incomplete", now_s)

    def _on_released(self, leg: Leg, event: LegReleased, is_current: bool, now_s: float) -> None:
        was_running = leg.is_running
        leg.life.advance(LegMove.RELEASE, now_s)
        self._timeline.overlap(
            {name: value for name, value in event.durations_s.items() if name not in self._handover_names},
            event.kv_bytes,
            event.kv_frames,
        )
        if leg.role is Role.DECODE:
            own = {name: value for name, value in event.durations_s.items() if name not in self._handover_names}
            self._timeline.nest(StageName.DECODE, leg.attempt, own)
        if is_current and was_running and self._matters(leg):
            self._end_attempt(LegOutcome.FAILED, f"{leg.role.label}_released_early", now_s)
        elif is_current:
            self._end_attempt_without_legs(now_s)

    def _on_node_lost(self, node: Incarnation, reason: str, now_s: float) -> None:
        lost = [leg for leg in self.legs if leg.node == node and not leg.is_closed]
        for leg in lost:
            leg.life.advance(LegMove.LOSE, now_s)
        current = [leg for leg in lost if leg.attempt == self.attempt and self.state in IN_ATTEMPT]
        for leg in current:
            if self._matters(leg) and not leg.did_its_part:
                if leg.role is Role.DECODE:
                    self._prefer = node
                self._end_attempt(LegOutcome.FAILED, f"{leg.role.label}_lost: {reason}", now_s)
                return
        if current:
            self._end_attempt_without_legs(now_s)

    def _matters(self, leg: Leg) -> bool:
        """Whether the leg's failure ends the attempt."""
        return leg.role is Role.DECODE or self.state is not SessionState.DECODING

    def _end_attempt_without_legs(self, now_s: float) -> None:
        """End the attempt if nobody works on it any more, although no leg failed: a message got lost, or a node is wrong."""
        if all(leg.is_closed for leg in self.legs if leg.attempt == self.attempt):
            self._end_attempt(LegOutcome.FAILED, "incomplete", now_s)

    # ---- the end of an attempt, and of the session

    def _end_attempt(self, outcome: LegOutcome, cause: str, now_s: float) -> None:
        if not self.life.advance(SessionMove.END_ATTEMPT, now_s):
            return
        self._cancel_legs(f"attempt ended: {cause}")
        self.sequence.drop_early()
        self._timeline.attempt_ended(self.attempt, cause, now_s)
        self._timeline.enter(StageName.RESUME, self.attempt + 1, now_s)
        if outcome is LegOutcome.CANCELLED and self._is_deadline_near(now_s):
            self._fail(DeadlineExceeded("the deadline passed"), now_s)
            return
        self._patience.attempt_ended(outcome, cause, now_s)
        if self._patience.is_exhausted:
            self._fail(self._patience.exhausted_error(), now_s)
            return
        self._ask_placement(now_s)

    def _is_deadline_near(self, now_s: float) -> bool:
        return self.facts.deadline_s is not None and now_s >= self.facts.deadline_s - DEADLINE_SLACK_S

    def _fail(self, error: PdserveError, now_s: float) -> None:
        if not self.life.advance(SessionMove.FAIL, now_s):
            return
        error.metadata.setdefault("num_tokens_sent", str(self.sequence.num_shown_tokens))
        error.metadata.setdefault("attempts", str(self.attempt))
        self._leave(error.reason.lower(), now_s)
        self._out.append(Fail(error))

    def _on_client_left(self, now_s: float) -> None:
        if self.life.advance(SessionMove.CANCEL, now_s):
            self._leave("the client left", now_s)
        elif self._answered_s is None:
            self._answered_s = now_s

    def _leave(self, why: str, now_s: float) -> None:
        self._out.append(WithdrawPlacement())
        self._cancel_legs(why)
        self._answered_s = now_s

    def _cancel_legs(self, reason: str) -> None:
        for leg in self.legs:
            if leg.is_running and not leg.is_cancelled:
                leg.is_cancelled = True
                self._out.append(CancelLeg(leg.node, leg.attempt, reason))

    def _on_tick(self, now_s: float) -> None:
        if self.facts.deadline_s is not None and now_s >= self.facts.deadline_s:
            self._fail(DeadlineExceeded("the deadline passed"), now_s)
        if (ends_s := self._wait_ends_s) is not None and now_s >= ends_s:
            self._fail(self._patience.wait_error(), now_s)
        if self._answered_s is not None and now_s >= self._answered_s + RELEASE_WAIT_S:
            for leg in self.legs:
                if leg.life.advance(LegMove.LOSE, now_s):
                    self._out.append(LegAbandoned(leg.node, leg.attempt))

    def _take_out(self, now_s: float) -> list[Instruction]:
        """Add what follows from where the session stands now, and return everything that is to be done."""
        are_closed = self.num_open_legs == 0
        due_s = self._answer_due_s
        if due_s is not None and self._answered_s is None and (are_closed or now_s >= due_s):
            self._answered_s = now_s
            self._out.append(self._answer(now_s))
        if self._answered_s is not None and are_closed and not self._is_closed:
            self._is_closed = True
            self._out.append(Close())
        out, self._out = self._out, []
        return out

    def _answer(self, now_s: float) -> Answer:
        if self._placed is None:
            raise InternalError(f"{self.life.subject} is complete without nodes; {self.life.tell()}")
        num_tokens = self.sequence.num_shown_tokens
        return Answer(
            num_prompt_tokens=len(self.facts.prompt_ids),
            num_cached_tokens=self._num_cached_tokens or 0,
            num_completion_tokens=num_tokens,
            timeline=self._timeline.build(num_tokens, self.attempt, now_s),
            prefill=self._placed.prefill,
            decode=self._placed.decode,
        )
