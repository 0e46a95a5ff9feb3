"""A session: a request's sequences from admission until the client is answered and every leg is released. Sans-IO.

Events and the time go in, instructions come out. Before `adopted`, the failure of either leg ends the attempt on both nodes;
after it only the decode leg matters. An attempt that ended is followed by another, from the tokens accepted so far. One attempt
continues one context: if several unfinished sequences have parted by then, the session keeps one and the others fork off, each
as a session of its own. What they have in common is in `family`.
"""

from collections.abc import Callable
from dataclasses import replace

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
    PromptScored,
    Submitted,
    Tick,
    Tokens,
)
from pdserve.router.facts import SessionFacts
from pdserve.router.instructions import (
    Answer,
    AskPlacement,
    Close,
    Deliver,
    DeliverPrompt,
    Fail,
    Finish,
    Fork,
    Instruction,
    PlacementQuery,
    Submit,
    WithdrawPlacement,
)
from pdserve.router.legs import Leg, LegMove, Legs
from pdserve.router.lifecycle import IN_ATTEMPT, SESSION_TABLE, SessionMove, SessionState
from pdserve.router.patience import Patience
from pdserve.router.prompt_scores import PromptScores
from pdserve.router.reports import Reports
from pdserve.router.sequences import Sequences
from pdserve.router.timeline import StageName, TimelineRecorder

SUMMARY_GRACE_S = 0.1
"""Longest that a complete answer waits for the nodes' own durations before its summary is sent."""
RELEASE_WAIT_S = 120.0
"""Longest that an answered session waits for `released`, a backstop: a node releases what is cancelled within a step."""
DEADLINE_SLACK_S = 0.25
"""A node that ends a leg this close to the deadline ended it for the deadline."""


class Session:
    """One request's machine. `handle` never raises for anything that the world can cause."""

    def __init__(
        self,
        facts: SessionFacts,
        sequences: Sequences,
        patience: Patience,
        timeline: TimelineRecorder,
        new_transfer_id: Callable[[], TransferId],
    ) -> None:
        self.facts, self.sequences = facts, sequences
        self.timeline, self._new_transfer_id = timeline, new_transfer_id
        self.patience = patience
        self._scores = PromptScores(facts.prompt_ids) if facts.prompt_logprobs else None
        self._tokens_before_scores: list[SampledToken] = []
        self.life = LifeCycle(SESSION_TABLE, f"session {facts.session_id}", facts.received_s)
        self.legs = Legs()
        self.attempt = 0
        self.num_stray_events = 0
        self._placed: Placed | None = None
        self._prefer: Incarnation | None = None
        self._reports = Reports(timeline)
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
    def e2el_s(self) -> float | None:
        """Time to the answer, seconds; None before it."""
        return None if self._answered_s is None else self._answered_s - self.facts.received_s

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
        self.timeline.enter(StageName.PLACEMENT, 1, now_s)
        if self._scores is not None and self._scores.is_complete:
            self._out.append(DeliverPrompt(self._scores.give()))
        self._ask_placement(now_s)
        return self._take_out(now_s)

    def child(self, part: Sequences, session_id: int) -> "Session":
        """Return the session that goes on with a part that was forked off; `resume` starts it."""
        facts = replace(self.facts, session_id=session_id, prompt_logprobs=False)
        child = Session(facts, part, self.patience.fork(), self.timeline.fork(), self._new_transfer_id)
        child.attempt, child._placed, child._prefer = self.attempt, self._placed, self._prefer
        child._reports.num_cached_tokens = self._reports.num_cached_tokens
        return child

    def resume(self, now_s: float) -> list[Instruction]:
        """Start a session that was forked off: ask for the next placement."""
        self._ask_placement(now_s)
        return self._take_out(now_s)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event and return what is to be done, in order."""
        match event:
            case Placed():
                self._on_placed(event, now_s)
            case PlacementRefused(error):
                if self.state is SessionState.ADMITTED:
                    self._fail(self.patience.refusal_error(error), now_s)
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

    def give_up(self, now_s: float) -> None:
        """Count as answered: the session broke, and the shell ended it."""
        self._answered_s = now_s if self._answered_s is None else self._answered_s

    def check_invariants(self) -> list[str]:
        """Return what is wrong; empty when all is well."""
        faults = []
        for leg in self.legs:
            is_abandoned = leg.attempt != self.attempt or self.state not in (*IN_ATTEMPT, SessionState.FINISHED)
            if leg.is_running and is_abandoned and not leg.is_cancelled:
                faults.append(f"{leg.life.subject} runs for nobody; {leg.life.tell()}")
        if self._is_closed and (self.legs.num_open or not self.is_answered):
            faults.append(f"{self.life.subject} is closed with open legs or without an answer; {self.life.tell()}")
        if self.sequences.is_complete != (self.state is SessionState.FINISHED) and not self.life.is_terminal:
            faults.append(f"{self.life.subject}: the sequences' ends and the state disagree; {self.life.tell()}")
        if self.sequences.is_complete != (not self.sequences.unfinished):
            faults.append(f"{self.life.subject}: the count of unfinished sequences is wrong; {self.life.tell()}")
        return faults

    # ---- placement

    def _ask_placement(self, now_s: float) -> None:
        self._out.append(
            AskPlacement(
                PlacementQuery(
                    session_id=self.facts.session_id,
                    num_tokens=len(self.facts.prompt_ids) + len(self.sequences.context_ids),
                    max_len=len(self.facts.prompt_ids) + self.facts.max_tokens,
                    num_sequences=len(self.sequences.unfinished),
                    needs_decode=self.sequences.num_remaining > 1,
                    is_resume=self._is_resume,
                    arrived_s=self.facts.received_s,
                    not_before_s=now_s + self.patience.backoff_s,
                    identity=self._placed.identity if self._placed else None,
                    exclude=self.patience.excluded,
                    prefer=self._prefer,
                    avoid=self.patience.avoided,
                )
            )
        )

    @property
    def _is_resume(self) -> bool:
        return self.sequences.num_tokens > 0 or self.patience.num_failures > 0

    @property
    def _wait_ends_s(self) -> float | None:
        if self.state is not SessionState.ADMITTED:
            return None
        return self.patience.wait_ends_s(is_resume=self._is_resume)

    def _on_placed(self, placed: Placed, now_s: float) -> None:
        if not self.life.advance(SessionMove.PLACE, now_s):
            return
        self.attempt += 1
        self._placed = placed
        self._reports.placed()
        self.legs.open(Role.PREFILL, placed.prefill, self.attempt, now_s)
        if placed.decode is not None:
            self.legs.open(Role.DECODE, placed.decode, self.attempt, now_s)
        unfinished = self.sequences.unfinished
        self._out.append(
            Submit(
                attempt=self.attempt,
                prefill=placed.prefill,
                decode=placed.decode,
                transfer_id=None if placed.decode is None else self._new_transfer_id(),
                output_ids=self.sequences.context_ids,
                first_sequence=unfinished[0],
                num_sequences=len(unfinished),
                prompt_logprobs=self._lacks_scores,
            )
        )

    def _on_submitted(self, attempt: int, now_s: float) -> None:
        if attempt == self.attempt and self.life.advance(SessionMove.SUBMIT, now_s):
            self.timeline.enter(StageName.PREFILL, attempt, now_s)

    # ---- what nodes say

    def _on_leg_event(self, event: LegEvent, now_s: float) -> None:
        leg = self.legs.find(event.node, event.attempt)
        if leg is None or leg.is_closed:
            self.num_stray_events += 1
            return
        is_current = leg.attempt == self.attempt and self.state in IN_ATTEMPT
        match event:
            case LegEnded():
                self._on_ended(leg, event, is_current, now_s)
            case LegReleased():
                self._on_released(leg, event, is_current, now_s)
            case PromptScored() if leg.role is Role.PREFILL and is_current:
                self._on_scored(event, now_s)
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

    @property
    def _lacks_scores(self) -> bool:
        return self._scores is not None and not self._scores.is_complete

    def _on_scored(self, event: PromptScored, now_s: float) -> None:
        if self._scores is None or self._scores.is_complete or not self._scores.take(event.start, event.scores):
            self.num_stray_events += 1
        elif self._scores.is_complete:
            self._out.append(DeliverPrompt(self._scores.give()))
            waiting, self._tokens_before_scores = self._tokens_before_scores, []
            self._accept(tuple(waiting), now_s)

    def _on_first_token(self, event: FirstToken, is_current: bool, now_s: float) -> None:
        self._reports.first_token(event, len(self.facts.prompt_ids))
        if not is_current:
            return
        is_first = self.life.advance(SessionMove.FIRST_TOKEN, now_s)
        self._accept(event.tokens, now_s)
        if is_first and self.state is SessionState.HANDING_OVER:
            self.timeline.enter(StageName.HANDOVER, self.attempt, now_s)

    def _on_adopted(self, event: Adopted, now_s: float) -> None:
        self._adopt(now_s)
        self._reports.adopted(event)
        self._accept(event.tokens, now_s)

    def _adopt(self, now_s: float) -> None:
        """Pass the commit point. Tokens of the decode node prove it as well as its word."""
        had_first_token = self.state is SessionState.HANDING_OVER
        if self.life.advance(SessionMove.ADOPT, now_s):
            if not had_first_token:
                self.timeline.enter(StageName.HANDOVER, self.attempt, now_s)
            self.timeline.enter(StageName.DECODE, self.attempt, now_s)

    def _accept(self, tokens: tuple[SampledToken, ...], now_s: float) -> None:
        if self._lacks_scores:
            self._tokens_before_scores += tokens  # at most the attempt's own tokens: its end drops them
            return
        step = self.sequences.accept(tokens, self._placed.eos_token_ids if self._placed else frozenset())
        self.num_stray_events += step.num_strays
        if step.has_progress:
            self.timeline.token(now_s)
            self.patience.progressed()
        self._out += [Deliver(gain) for gain in step.gains]
        self._out += [Finish(index, end.reason, end.stop, end.stop_token_id) for index, end in step.ended]
        if not self.sequences.is_complete:
            alone = tuple(index for index, end in step.ended if not end.by_node)
            if alone:
                self._out += self.legs.cancel_sequences(self.attempt, alone, "the sequence is complete")
        elif self.life.advance(SessionMove.COMPLETE, now_s):
            self.timeline.enter(StageName.ANSWER, self.attempt, now_s)
            self._answer_due_s = now_s + SUMMARY_GRACE_S
            if not self.sequences.ended_by_nodes:
                self._out += self.legs.cancel("the answer is complete")

    def _on_ended(self, leg: Leg, event: LegEnded, is_current: bool, now_s: float) -> None:
        if not leg.life.advance(LegMove.END, now_s):
            return
        leg.outcome = event.outcome
        if not is_current or not self._matters(leg):
            return
        if event.outcome is LegOutcome.REFUSED:
            self.patience.refused(event)
        is_adopted = self.state is SessionState.DECODING
        is_alone = self._placed is not None and self._placed.decode is None
        if event.outcome is not LegOutcome.FINISHED:
            cause = event.reason or event.outcome.name.lower()
            self._end_attempt(event.outcome, cause, now_s, event.detail)
        elif is_adopted or is_alone:
            self._end_attempt(LegOutcome.FAILED, f"{leg.role.label}_incomplete", now_s)

    def _on_released(self, leg: Leg, event: LegReleased, is_current: bool, now_s: float) -> None:
        was_running = leg.is_running
        leg.life.advance(LegMove.RELEASE, now_s)
        self._reports.released(event, leg.role)
        if is_current and was_running and self._matters(leg):
            self._end_attempt(LegOutcome.FAILED, f"{leg.role.label}_released_early", now_s)
        elif is_current:
            self._end_attempt_without_legs(now_s)

    def _on_node_lost(self, node: Incarnation, reason: str, now_s: float) -> None:
        lost = self.legs.lose(node, now_s)
        current = [leg for leg in lost if leg.attempt == self.attempt and self.state in IN_ATTEMPT]
        for leg in current:
            if self._matters(leg) and not leg.did_its_part:
                if leg.role is Role.DECODE:
                    self._prefer = node
                self._end_attempt(LegOutcome.FAILED, f"{leg.role.label}_lost", now_s, reason)
                return
        if current:
            self._end_attempt_without_legs(now_s)

    def _matters(self, leg: Leg) -> bool:
        """Whether the leg's failure ends the attempt."""
        return leg.role is Role.DECODE or self.state is not SessionState.DECODING or self._lacks_scores

    def _end_attempt_without_legs(self, now_s: float) -> None:
        """End the attempt if nobody works on it any more, although no leg failed: a message got lost, or a node is wrong."""
        if self.legs.are_closed(self.attempt):
            self._end_attempt(LegOutcome.FAILED, "incomplete", now_s)

    # ---- the end of an attempt, and of the session

    def _end_attempt(self, outcome: LegOutcome, cause: str, now_s: float, detail: str = "") -> None:
        is_adopted = self.state is SessionState.DECODING
        if not self.life.advance(SessionMove.END_ATTEMPT, now_s):
            return
        self._out += self.legs.cancel(f"attempt ended: {cause}")
        self.sequences.drop_early()
        self._tokens_before_scores.clear()
        self.timeline.attempt_ended(self.attempt, cause, now_s)
        self.timeline.enter(StageName.RESUME, self.attempt + 1, now_s)
        if outcome is LegOutcome.CANCELLED and self._is_deadline_near(now_s):
            self._fail(DeadlineExceeded("the deadline passed"), now_s)
            return
        nodes = frozenset() if self._placed is None else self._placed.at_work(is_adopted=is_adopted)
        self.patience.attempt_ended(outcome, cause, now_s, detail, nodes)
        if self.patience.is_exhausted:
            self._fail(self.patience.exhausted_error(), now_s)
            return
        if not self.sequences.fit_one_attempt:
            self._out.append(Fork(tuple(self.sequences.part())))
        self._ask_placement(now_s)

    def _is_deadline_near(self, now_s: float) -> bool:
        return self.facts.deadline_s is not None and now_s >= self.facts.deadline_s - DEADLINE_SLACK_S

    def _fail(self, error: PdserveError, now_s: float) -> None:
        if not self.life.advance(SessionMove.FAIL, now_s):
            return
        error.metadata.setdefault("num_tokens_sent", str(self.sequences.num_shown_tokens))
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
        self._out += self.legs.cancel(why)
        self._answered_s = now_s

    def _on_tick(self, now_s: float) -> None:
        if self.facts.deadline_s is not None and now_s >= self.facts.deadline_s:
            self._fail(DeadlineExceeded("the deadline passed"), now_s)
        if (ends_s := self._wait_ends_s) is not None and now_s >= ends_s:
            self._fail(self.patience.wait_error(), now_s)
        if self._answered_s is not None and now_s >= self._answered_s + RELEASE_WAIT_S:
            self._out += self.legs.abandon(now_s)

    def _take_out(self, now_s: float) -> list[Instruction]:
        """Add what follows from where the session stands now, and return everything that is to be done."""
        are_closed = self.legs.num_open == 0
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
        return Answer(
            num_prompt_tokens=len(self.facts.prompt_ids),
            num_cached_tokens=self._reports.num_cached_tokens,
            num_completion_tokens=self.sequences.num_shown_tokens,
            timeline=self.timeline.build(self.sequences.longest, self.attempt, now_s),
            prefill=self._placed.prefill,
            decode=self._placed.decode,
        )
