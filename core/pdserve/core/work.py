"""A node's leg of an attempt as one valid, typed value, and the rule that ends a sequence.

Both nodes apply the same `Work.finish_reason`, so a sequence ends the same way wherever its last token is made.
"""

import hashlib
from array import array
from dataclasses import dataclass
from enum import IntEnum

from pdserve.core.ids import Incarnation, LegKey, TransferId


class FinishReason(IntEnum):
    """Why a sequence ended; the values are those of the contract."""

    STOP = 1
    STOP_SEQUENCE = 2
    LENGTH = 3


class LegOutcome(IntEnum):
    """How a node's leg of an attempt ended; the values are those of the contract."""

    FINISHED = 1
    CANCELLED = 2
    BUSY = 3
    REFUSED = 4
    FAILED = 5
    EVICTED = 6
    DRAINED = 7


class GrammarKind(IntEnum):
    """The notation of a grammar; the values are those of the contract."""

    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that an output must belong to."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each token is chosen; every value resolved. What changes logits is applied in the order of transformers' processors.

    `temperature` 0 is greedy, `top_k` 0 keeps all, `top_p` in (0, 1], `min_p` in [0, 1), `seed` is the key of the noise.
    `logit_bias` holds (token id, addend), `banned_sequences` ids that may not follow each other in the output;
    `allowed_token_ids` empty allows all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] = frozenset()
    banned_token_ids: frozenset[int] = frozenset()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and the filters has a say: then a row needs to know the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.grammar is not None
            or bool(self.logit_bias or self.allowed_token_ids or self.banned_token_ids or self.banned_sequences)
        )


@dataclass(frozen=True, slots=True)
class Work:
    """One leg, from a router's submit.

    `prompt_ids` and `output_ids` are kept apart so that limits and positions stay absolute: the next token has output index
    `len(output_ids)`. `arrived_s` and `deadline_s` are on this process's monotonic clock.

    The leg continues one context with `num_sequences` sequences, numbered from `first_sequence` in the request; they share the
    context's blocks, and each ends on its own. Before `min_tokens` output tokens no EOS or stop id is chosen. `top_logprobs` most
    likely tokens are reported per output position, and with `prompt_logprobs` the scores of the prompt as well.
    """

    leg: LegKey
    transfer_id: TransferId | None
    prefill: Incarnation
    decode: Incarnation | None
    label: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    arrived_s: float
    deadline_s: float | None
    num_sequences: int = 1
    first_sequence: int = 0
    min_tokens: int = 0
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    @property
    def sequences(self) -> range:
        """Indexes of the leg's sequences in the request."""
        return range(self.first_sequence, self.first_sequence + self.num_sequences)

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Ids whose KV the prefill node computes: the prompt and the output accepted so far."""
        return self.prompt_ids + self.output_ids

    @property
    def context_len(self) -> int:
        """Number of context ids; also the number of tokens of the transfer."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def next_index(self) -> int:
        """Absolute output index of the next token."""
        return len(self.output_ids)

    @property
    def max_len(self) -> int:
        """Longest the sequence can get, tokens of prompt and output together."""
        return len(self.prompt_ids) + self.max_tokens

    def finish_reason(self, token_id: int, index: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Return why the sequence ends with `token_id` at absolute output `index`, or None if it goes on."""
        if token_id in self.stop_token_ids or (not self.ignore_eos and token_id in eos_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.max_tokens else None


TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of one position, best first: (token id, natural log-probability under the unmodified distribution)."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token with its absolute output index and natural log-probability under the unmodified distribution.

    `sequence` is the index of its sequence in the request; `top` holds the alternatives, if they were asked for.
    """

    index: int
    token_id: int
    logprob: float
    finish_reason: FinishReason | None = None
    sequence: int = 0
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class TokenScore:
    """What the model thought of a prompt token, given those before it; natural log-probabilities."""

    logprob: float
    top: TopLogprobs = ()


def prompt_digest(token_ids: tuple[int, ...]) -> bytes:
    """Return SHA-256 over the ids as little-endian 32-bit numbers, 32 bytes."""
    ids = array("I", token_ids)
    return hashlib.sha256(ids.tobytes()).digest()
