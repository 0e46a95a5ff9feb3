"""What a node still has to tell one router: tokens per sequence, not messages.

While the stream is blocked, later tokens of a sequence join those that wait, so what is kept grows with the tokens and never
with the steps. A message that would grow beyond `MAX_MESSAGE_BYTES` is sealed, and the next begins. Bound: tokens are limited
by the running sequences' own limits, events by six per leg and one per 1024 prompt tokens that are scored; `size_bytes`
counts them, and a stream blocked for longer than its lease is closed by its owner, which drops everything.
"""

from collections import deque

from pdserve.core.ids import LegKey
from pdserve.core.work import SampledToken
from pdserve.node.pb import finish_to_pb, top_to_pb
from pdserve.v1 import node_pb2

ENTRY_BYTES = 64
"""What a sequence's entry takes besides its tokens, at most."""
TOKEN_BYTES = 10
"""An id and a log-probability, at most."""
TOP_BYTES = 8
"""The alternatives of one position, besides `TOKEN_BYTES` for each."""
MAX_MESSAGE_BYTES = 512 << 10
"""A message is sealed once it is this large. With one more event (256 KiB at most) it is still below the contract's 1 MiB."""


class Outbox:
    """Pending step output of one router.

    A message's tokens are read before its events, so tokens that follow an event of the same leg start a new message.
    """

    def __init__(self) -> None:
        self._sealed: deque[_Batch] = deque()
        self._open = _Batch()

    @property
    def size_bytes(self) -> int:
        """Estimate of what is pending, bytes."""
        return sum(batch.size_bytes for batch in self._sealed) + self._open.size_bytes

    def __bool__(self) -> bool:
        """Whether anything is pending."""
        return bool(self._sealed) or not self._open.is_empty

    def add_token(self, leg: LegKey, token: SampledToken) -> None:
        """Add the next token of a sequence of `leg`."""
        if leg in self._open.legs_with_events:
            self._seal()
        self._open.add_token(leg, token)
        self._seal_if_large()

    def add_event(self, leg: LegKey, event: node_pb2.LegEvent) -> None:
        """Add an event of a leg."""
        self._open.add_event(leg, event)
        self._seal_if_large()

    def take(self) -> node_pb2.StepOutput | None:
        """Remove and return the next message, or None."""
        if self._sealed:
            return self._sealed.popleft().to_pb()
        if self._open.is_empty:
            return None
        batch, self._open = self._open, _Batch()
        return batch.to_pb()

    def _seal_if_large(self) -> None:
        if self._open.size_bytes >= MAX_MESSAGE_BYTES:
            self._seal()

    def _seal(self) -> None:
        self._sealed.append(self._open)
        self._open = _Batch()


class _Batch:
    """One message in the making."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[LegKey, int], node_pb2.SequenceTokens] = {}
        self.events: list[node_pb2.LegEvent] = []
        self.legs_with_events: set[LegKey] = set()
        self.size_bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self.tokens and not self.events

    def add_token(self, leg: LegKey, token: SampledToken) -> None:
        entry = self.tokens.get((leg, token.sequence))
        if entry is None:
            entry = node_pb2.SequenceTokens(
                session_id=leg.session.session_id,
                attempt=leg.attempt,
                sequence=token.sequence,
                first_index=token.index,
            )
            self.tokens[leg, token.sequence] = entry
            self.size_bytes += ENTRY_BYTES
        assert token.index == entry.first_index + len(entry.token_ids), "tokens of a sequence are consecutive"
        entry.token_ids.append(token.token_id)
        entry.logprobs.append(token.logprob)
        entry.finish_reason = finish_to_pb(token.finish_reason)
        self.size_bytes += TOKEN_BYTES
        if token.top:
            entry.top_logprobs.append(top_to_pb(token.top))
            self.size_bytes += TOP_BYTES + TOKEN_BYTES * len(token.top)

    def add_event(self, leg: LegKey, event: node_pb2.LegEvent) -> None:
        self.events.append(event)
        self.legs_with_events.add(leg)
        self.size_bytes += event.ByteSize()

    def to_pb(self) -> node_pb2.StepOutput:
        return node_pb2.StepOutput(tokens=self.tokens.values(), events=self.events)
