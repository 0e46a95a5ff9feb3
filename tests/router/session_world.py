"""A session among scripted nodes: builds events, records instructions, and checks what must hold after every event."""

from dataclasses import dataclass, field

from pdserve.core.build import Role
from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.work import FinishReason, LegOutcome, SampledToken
from pdserve.router.events import (
    Adopted,
    ClientLeft,
    Event,
    FirstToken,
    LegEnded,
    LegReleased,
    NodeLost,
    Placed,
    Submitted,
    Tick,
    Tokens,
)
from pdserve.router.facts import SessionFacts
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
from tests.router.models import byte_level_tokenizer, vocabulary_of

TOKENIZER = byte_level_tokenizer()
VOCABULARY = vocabulary_of(TOKENIZER)
EOS = 2
TEXT = "abcdefgh"
IDS = tuple(TOKENIZER.encode(TEXT).ids)
NODES = {Role.PREFILL: (Incarnation(b"P" * 16), Incarnation(b"p" * 16)), Role.DECODE: (Incarnation(b"D" * 16),) * 2}
ROLES = {"P": Role.PREFILL, "D": Role.DECODE}


@dataclass
class World:
    """One session, the instructions it gave, and a script that its nodes follow: token i of every attempt is IDS[i]."""

    max_tokens: int = 3
    stops: tuple[str, ...] = ()
    deadline_s: float | None = 50.0
    max_attempts: int = 3
    ids: tuple[int, ...] = IDS
    now_s: float = 1.0
    log: list[Instruction] = field(default_factory=list)
    asked: PlacementQuery | None = None
    submit: Submit | None = None
    shown_ids: list[int] = field(default_factory=list)
    text: str = ""
    is_client_gone: bool = False

    def __post_init__(self) -> None:
        output = OutputText(VOCABULARY.detokenizer(), self.stops)
        rules = EndRules(self.max_tokens, frozenset(), ignore_eos=False)
        self.session = Session(
            SessionFacts(7, (5, 6, 7), self.max_tokens, 0.0, self.deadline_s),
            Sequences({0: Sequence(rules, output)}),
            Patience(SessionLimits(self.max_attempts, queue_wait_s=60.0, resume_wait_s=30.0), 0.0),
            TimelineRecorder(0.0),
            lambda: TransferId(b"t" * 16),
        )
        self.take(self.session.begin(self.now_s))

    def take(self, instructions: list[Instruction]) -> list[Instruction]:
        """Record instructions and check each against the rules."""
        for instruction in instructions:
            assert not any(isinstance(earlier, Close) for earlier in self.log), "nothing follows Close"
            match instruction:
                case AskPlacement(query):
                    assert self.asked is None, "one question at a time"
                    self.asked = query
                case WithdrawPlacement():
                    self.asked = None
                case Submit():
                    assert not self.is_over, "no submit after the end"
                    assert len(instruction.output_ids) < self.max_tokens
                    assert (instruction.decode is None) == (self.max_tokens - len(instruction.output_ids) == 1)
                    assert (instruction.transfer_id is None) == (instruction.decode is None)
                    self.submit = instruction
                case DeliverPrompt(_):
                    assert not self.shown_ids, "the prompt's scores come first"
                case Deliver(gain):
                    shown = gain.shown
                    assert not self.is_over, "no text after the end"
                    self.shown_ids += [token.token_id for token in shown.tokens]
                    self.text += shown.text
                case Answer() | Fail():
                    assert not any(isinstance(earlier, Answer | Fail) for earlier in self.log), "one terminal answer"
                case Finish() | CancelLeg() | Close():
                    pass
            self.log.append(instruction)
        assert tuple(self.shown_ids) == self.ids[: len(self.shown_ids)], "tokens come once and in order"
        assert not self.session.check_invariants()
        return instructions

    @property
    def is_over(self) -> bool:
        return any(isinstance(instruction, Answer | Fail | Finish) for instruction in self.log)

    @property
    def is_closed(self) -> bool:
        return any(isinstance(instruction, Close) for instruction in self.log)

    def tell(self, event: Event) -> list[Instruction]:
        self.is_client_gone = self.is_client_gone or isinstance(event, ClientLeft)
        return self.take(self.session.handle(event, self.now_s))

    def wait(self, seconds: float) -> list[Instruction]:
        """Let time pass, and tell the session so."""
        self.now_s += seconds
        return self.tell(Tick())

    def place(self, which: int = 0) -> list[Instruction]:
        """Answer the open question, and confirm the submit that follows."""
        assert self.asked is not None
        needs_decode, self.asked = self.asked.needs_decode, None
        decode = NODES[Role.DECODE][which] if needs_decode else None
        out = self.tell(Placed(NODES[Role.PREFILL][which], decode, "identity", frozenset({EOS})))
        return out + self.tell(Submitted(self.session.attempt))

    def first(self, attempt: int = 1) -> list[Instruction]:
        index = self.base(attempt)
        return self.tell(
            FirstToken(self.node("P", attempt), attempt, (self.token(index),), 2, {"prefill.compute": 0.5})
        )

    def adopted(self, attempt: int = 1) -> list[Instruction]:
        index = self.base(attempt)
        return self.tell(Adopted(self.node("D", attempt), attempt, (self.token(index),), {"decode.place": 0.01}))

    def tokens(self, *indexes: int, attempt: int = 1) -> list[Instruction]:
        return self.tell(Tokens(self.node("D", attempt), attempt, tuple(self.token(i) for i in indexes)))

    def ended(self, who: str, outcome: LegOutcome, attempt: int = 1) -> list[Instruction]:
        return self.tell(LegEnded(self.node(who, attempt), attempt, outcome, "why", "because"))

    def released(self, who: str, attempt: int = 1) -> list[Instruction]:
        durations = {"decode.compute": 0.2} if who == "D" else {"prefill.exposed_transfer": 0.1, "prefill.pack": 0.05}
        return self.tell(LegReleased(self.node(who, attempt), attempt, durations, 100, 2))

    def lost(self, who: str, attempt: int = 1) -> list[Instruction]:
        return self.tell(NodeLost(self.node(who, attempt), "stream broke"))

    def token(self, index: int) -> SampledToken:
        end = FinishReason.LENGTH if index + 1 >= self.max_tokens else None
        return SampledToken(index, self.ids[index], -1.0, end)

    def base(self, attempt: int) -> int:
        """Return the first index of the attempt: what was accepted when it was submitted."""
        submits = [entry for entry in self.log if isinstance(entry, Submit) and entry.attempt == attempt]
        return min(len(submits[0].output_ids) if submits else 0, self.max_tokens - 1)

    def node(self, who: str, attempt: int) -> Incarnation:
        legs = [leg for leg in self.session.legs if leg.role is ROLES[who] and leg.attempt == attempt]
        return legs[0].node if legs else NODES[ROLES[who]][0]
