"""What a session asks of its shell. Values only."""

from dataclasses import dataclass

from pdserve.core.errors import PdserveError
from pdserve.core.ids import Incarnation, TransferId
from pdserve.core.work import FinishReason
from pdserve.router.output import Gain
from pdserve.router.packed import PackedPrompt
from pdserve.router.sequences import Sequences
from pdserve.router.timeline import Timeline


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """Asks for nodes for the next attempt.

    `num_tokens` is what the prefill node computes, `max_len` the longest a sequence can get; tokens. `num_sequences` share the
    former. A session stays with one `identity` once it was placed. `prefer` is a node that probably still holds the KV; `avoid`
    are those with which attempts of this session failed: the same ones may fail again, and are idle the sooner for it.
    """

    session_id: int
    num_tokens: int
    max_len: int
    needs_decode: bool
    is_resume: bool
    arrived_s: float
    not_before_s: float
    num_sequences: int = 1
    identity: str | None = None
    exclude: frozenset[Incarnation] = frozenset()
    prefer: Incarnation | None = None
    avoid: frozenset[Incarnation] = frozenset()


@dataclass(frozen=True, slots=True)
class AskPlacement:
    """Find nodes; answer with Placed or PlacementRefused, now or later."""

    query: PlacementQuery


@dataclass(frozen=True, slots=True)
class WithdrawPlacement:
    """The question is void."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit the attempt to its nodes; answer with Submitted, or with NodeLost if a stream is gone.

    `num_sequences` from `first_sequence` on continue the one context of prompt and `output_ids`.
    """

    attempt: int
    prefill: Incarnation
    decode: Incarnation | None
    transfer_id: TransferId | None
    output_ids: tuple[int, ...]
    first_sequence: int = 0
    num_sequences: int = 1
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Cancel the attempt on one node, or only some of its sequences."""

    node: Incarnation
    attempt: int
    reason: str
    sequences: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeliverPrompt:
    """Show the client the scores of the whole prompt, before anything else."""

    tokens: PackedPrompt


@dataclass(frozen=True, slots=True)
class Deliver:
    """Show the client text and tokens of one sequence."""

    gain: Gain


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell the client that a sequence is complete."""

    sequence: int
    reason: FinishReason
    stop: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Close the answer with its summary: the good end of the session's sequences. `num_cached_tokens` None: nobody said."""

    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_completion_tokens: int
    timeline: Timeline
    prefill: Incarnation
    decode: Incarnation | None


@dataclass(frozen=True, slots=True)
class Fail:
    """Close the client's answer with an error: the bad end."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class Fork:
    """Each part goes on as a session of its own; see `Session.child`."""

    parts: tuple[Sequences, ...]


@dataclass(frozen=True, slots=True)
class LegAbandoned:
    """A node did not release a leg in time; its story goes to the log."""

    node: Incarnation
    attempt: int


@dataclass(frozen=True, slots=True)
class Close:
    """The client is answered and every leg is released: forget the session."""


Instruction = (
    AskPlacement
    | WithdrawPlacement
    | Submit
    | CancelLeg
    | DeliverPrompt
    | Deliver
    | Finish
    | Answer
    | Fail
    | Fork
    | LegAbandoned
    | Close
)
