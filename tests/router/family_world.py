"""A request of several sequences among scripted nodes: plays the shell for all its sessions, and checks every instruction."""

from dataclasses import dataclass, field

from pdserve.core.build import Role
from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.work import FinishReason, LegOutcome, SampledToken, TokenScore
from pdserve.router.events import (
    Aborted,
    Adopted,
    ClientLeft,
    Event,
    FirstToken,
    LegEnded,
    LegReleased,
    NodeLost,
    Placed,
    PromptScored,
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
    PlacementQuery,
    Submit,
    WithdrawPlacement,
)
from pdserve.router.output import OutputText
from pdserve.router.patience import Patience, SessionLimits
from pdserve.router.sequence import EndRules, Sequence
from pdserve.router.sequences import Sequences
from pdserve.router.session import Session
from pdserve.router.timeline import TimelineRecorder
from tests.router.session_world import EOS, NODES, ROLES, TOKENIZER, VOCABULARY

LETTERS = tuple(tuple(TOKENIZER.encode(letters).ids) for letters in ("abcd", "efgh", "ijkl"))
PROMPT = (5, 6, 7)


@dataclass
class FamilyWorld:
    """Token i of sequence s is `scripts[s][i]` in every attempt; EOS in a script ends its sequence."""

    scripts: tuple[tuple[int, ...], ...] = LETTERS
    max_tokens: int = 3
    stops: tuple[str, ...] = ()
    max_attempts: int = 3
    prompt_logprobs: bool = False
    now_s: float = 1.0
    log: list[tuple[int, Instruction]] = field(default_factory=list)
    asked: dict[int, PlacementQuery] = field(default_factory=dict)
    submits: dict[tuple[int, int], Submit] = field(default_factory=dict)
    shown: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finished: dict[int, Finish] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    prompt: list[DeliverPrompt] = field(default_factory=list)
    end: Answer | Fail | None = None
    is_client_gone: bool = False

    def __post_init__(self) -> None:
        rules = EndRules(self.max_tokens, frozenset(), ignore_eos=False)
        outputs = [OutputText(VOCABULARY.detokenizer(), self.stops) for _ in self.scripts]
        session = Session(
            SessionFacts(1, PROMPT, self.max_tokens, 0.0, None, self.prompt_logprobs),
            Sequences({index: Sequence(rules, output) for index, output in enumerate(outputs)}),
            Patience(SessionLimits(self.max_attempts, queue_wait_s=60.0, resume_wait_s=30.0), 0.0),
            TimelineRecorder(0.0),
            lambda: TransferId(b"t" * 16),
        )
        self.family = Family()
        self.sessions: dict[int, Session] = {1: session}
        self.family.join(session)
        self.take(1, session.begin(self.now_s))

    # ---- the shell

    def take(self, number: int, instructions: list[Instruction]) -> list[Instruction]:
        for instruction in instructions:
            assert number not in self.closed, "nothing follows Close"
            self.log.append((number, instruction))
            match instruction:
                case AskPlacement(query):
                    assert number not in self.asked, "one question at a time"
                    self.asked[number] = query
                case WithdrawPlacement():
                    self.asked.pop(number, None)
                case Submit():
                    self._check_submit(number, instruction)
                    self.submits[number, instruction.attempt] = instruction
                case DeliverPrompt():
                    assert not self.shown, "the prompt's scores come first"
                    self.prompt.append(instruction)
                case Deliver(gain):
                    assert gain.sequence not in self.finished, "nothing follows a sequence's end"
                    assert not isinstance(self.end, Fail), "nothing follows the error"
                    self.shown.setdefault(gain.sequence, []).extend(token.token_id for token in gain.shown.tokens)
                    self.texts[gain.sequence] = self.texts.get(gain.sequence, "") + gain.shown.text
                case Finish(sequence):
                    assert sequence not in self.finished, "one end per sequence"
                    self.finished[sequence] = instruction
                case Answer():
                    answer = self.family.answered(self.sessions[number], instruction)
                    assert answer is None or self.end is None, "one summary"
                    self.end = answer or self.end
                case Fail(error):
                    if self.family.failed(error):
                        assert self.end is None, "no error after the summary"
                        self.end = instruction
                        for other in [other for other in self.sessions if other not in self.closed | {number}]:
                            self.tell(other, Aborted(error))
                case Fork(parts):
                    for part in parts:
                        self._fork(number, part)
                case Close():
                    self.closed.add(number)
                case _:
                    pass
        for sequence, ids in self.shown.items():
            assert tuple(ids) == self.scripts[sequence][: len(ids)], "tokens come once and in order"
        assert not [fault for session in self.sessions.values() for fault in session.check_invariants()]
        return instructions

    def _fork(self, number: int, part: Sequences) -> None:
        child = self.sessions[number].child(part, 1 + len(self.sessions))
        self.sessions[child.facts.session_id] = child
        self.family.join(child)
        self.take(child.facts.session_id, child.resume(self.now_s))

    def _check_submit(self, number: int, submit: Submit) -> None:
        assert self.end is None
        indexes = range(submit.first_sequence, submit.first_sequence + submit.num_sequences)
        assert indexes, "somebody must be continued"
        assert not set(indexes) & self.finished.keys(), "an ended sequence is never continued"
        assert self.sessions[number].sequences.unfinished == list(indexes)
        for index in indexes:
            assert submit.output_ids == self.scripts[index][: len(submit.output_ids)], "all continue the same context"
        assert (submit.decode is None) == (self.max_tokens - len(submit.output_ids) == 1)

    def tell(self, number: int, event: Event) -> list[Instruction]:
        if number in self.closed:
            return []
        return self.take(number, self.sessions[number].handle(event, self.now_s))

    def tell_all(self, event: Event) -> None:
        self.is_client_gone = self.is_client_gone or isinstance(event, ClientLeft)
        for number in list(self.sessions):
            self.tell(number, event)

    # ---- what the world says

    def place(self, number: int = 1, which: int = 0) -> None:
        query = self.asked.pop(number, None)
        if query is None:
            return
        decode = NODES[Role.DECODE][which] if query.needs_decode else None
        self.tell(number, Placed(NODES[Role.PREFILL][which], decode, "identity", frozenset({EOS})))
        self.tell(number, Submitted(self.sessions[number].attempt))

    def firsts(self, number: int, attempt: int) -> tuple[SampledToken, ...]:
        submit = self.submits[number, attempt]
        indexes = range(submit.first_sequence, submit.first_sequence + submit.num_sequences)
        return tuple(self.token(index, len(submit.output_ids)) for index in indexes)

    def first(self, number: int = 1, attempt: int = 1) -> list[Instruction]:
        node, tokens = self.node(number, "P", attempt), self.firsts(number, attempt)
        return self.tell(number, FirstToken(node, attempt, tokens, 2 if attempt == 1 else 0, {"prefill.compute": 0.1}))

    def adopted(self, number: int = 1, attempt: int = 1) -> list[Instruction]:
        node, tokens = self.node(number, "D", attempt), self.firsts(number, attempt)
        return self.tell(number, Adopted(node, attempt, tokens, {"decode.place": 0.01}))

    def tokens(self, number: int, attempt: int, *at: tuple[int, int]) -> list[Instruction]:
        """Say tokens by (sequence, index)."""
        tokens = tuple(self.token(sequence, index) for sequence, index in at)
        return self.tell(number, Tokens(self.node(number, "D", attempt), attempt, tokens))

    def scored(self, start: int, count: int, number: int = 1, attempt: int = 1) -> list[Instruction]:
        scores = tuple(TokenScore(-float(position)) for position in range(start, start + count))
        return self.tell(number, PromptScored(self.node(number, "P", attempt), attempt, start, scores))

    def ended(self, number: int, who: str, outcome: LegOutcome, attempt: int) -> list[Instruction]:
        return self.tell(number, LegEnded(self.node(number, who, attempt), attempt, outcome, "why", "because"))

    def released(self, number: int, who: str, attempt: int) -> list[Instruction]:
        return self.tell(number, LegReleased(self.node(number, who, attempt), attempt, {"decode.compute": 0.2}, 100, 2))

    def lost(self, who: str) -> None:
        """Lose a node: every session on it is told, as the shell does."""
        for node in dict.fromkeys(NODES[ROLES[who]]):
            self.tell_all(NodeLost(node, "stream broke"))

    def token(self, sequence: int, index: int) -> SampledToken:
        script = self.scripts[sequence]
        token_id = script[min(index, len(script) - 1)]
        end = FinishReason.STOP if token_id == EOS else FinishReason.LENGTH if index + 1 >= self.max_tokens else None
        return SampledToken(index, token_id, -1.0, end, sequence)

    def node(self, number: int, who: str, attempt: int) -> Incarnation:
        legs = [leg for leg in self.sessions[number].legs if leg.role is ROLES[who] and leg.attempt == attempt]
        return legs[0].node if legs else NODES[ROLES[who]][0]

    # ---- what the test asks

    def cancels(self, number: int) -> list[CancelLeg]:
        return [entry for owner, entry in self.log if owner == number and isinstance(entry, CancelLeg)]

    def run_to_the_end(self) -> None:
        """Let every session be placed and every node do its work."""
        for _ in range(20):
            for number, session in list(self.sessions.items()):
                if number in self.asked:
                    self.place(number)
                if number in self.closed or not session.attempt or number in self.asked:
                    continue
                self._work(number, session)
            if self.closed == self.sessions.keys():
                return
        raise AssertionError("the sessions do not come to an end")

    def _work(self, number: int, session: Session) -> None:
        attempt = session.attempt
        if not session.life.is_terminal:
            if self.prompt_logprobs:
                self.scored(1, len(PROMPT) - 1, number, attempt)
            self.first(number, attempt)
            if self.submits[number, attempt].decode is not None:
                self.adopted(number, attempt)
                left = session.sequences.unfinished
                more = [(sequence, index) for index in range(self.max_tokens) for sequence in left]
                self.tokens(number, attempt, *more)
        for leg in list(session.legs):
            who = "P" if leg.role is Role.PREFILL else "D"
            self.ended(number, who, LegOutcome.FINISHED, leg.attempt)
            self.released(number, who, leg.attempt)

    def close(self) -> None:
        """Let every node release everything, and time pass: the request must end, once, and leave nothing."""
        for _ in range(4):
            for number, session in list(self.sessions.items()):
                for leg in list(session.legs):
                    self.released(number, "P" if leg.role is Role.PREFILL else "D", leg.attempt)
            self.now_s += 200.0
            self.tell_all(Tick())
        assert self.closed == set(self.sessions), [session.life.tell() for session in self.sessions.values()]
        assert self.family.is_answered
        assert self.is_client_gone or self.end is not None
        if isinstance(self.end, Answer):
            assert self.finished.keys() == set(range(len(self.scripts))), "each sequence has exactly one end"
            assert self.end.num_completion_tokens == sum(map(len, self.shown.values()))
