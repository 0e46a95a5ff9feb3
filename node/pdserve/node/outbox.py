"""What a node still has to tell one router: tokens per sequence, not messages.

While the stream is blocked, later tokens of a sequence join those that wait, so what is kept grows with the tokens and never
with the steps. Bound: tokens are limited by the running sequences' own limits, events by five per leg; `size_bytes` counts
them, and a stream blocked for longer than its lease is closed by its owner, which drops everything.
"""

from collections import deque
from collections.abc import Sequence

from pdserve.core.ids import LegKey
from pdserve.core.work import FinishReason
from pdserve.node.pb import finish_to_pb
from pdserve.v1 import node_pb2

EVENT_BYTES = 128
TOKEN_BYTES = 8


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

    def add_tokens(
        self,
        leg: LegKey,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish: FinishReason | None,
    ) -> None:
        """Add consecutive tokens of a sequence, from absolute output index `first_index`."""
        if leg in self._open.legs_with_events:
            self._sealed.append(self._open)
            self._open = _Batch()
        self._open.add_tokens(leg, first_index, token_ids, logprobs, finish)

    def add_event(self, leg: LegKey, event: node_pb2.LegEvent) -> None:
        """Add an event of a leg."""
        self._open.events.append(event)
        self._open.legs_with_events.add(leg)

    def take(self) -> node_pb2.StepOutput | None:
        """Remove and return the next message, or None."""
        if self._sealed:
            return self._sealed.popleft().to_pb()
        if self._open.is_empty:
            return None
        batch, self._open = self._open, _Batch()
        return batch.to_pb()


class _Batch:
    """One message in the making."""

    def __init__(self) -> None:
        self.tokens: dict[LegKey, node_pb2.SequenceTokens] = {}
        self.events: list[node_pb2.LegEvent] = []
        self.legs_with_events: set[LegKey] = set()

    @property
    def is_empty(self) -> bool:
        return not self.tokens and not self.events

    @property
    def size_bytes(self) -> int:
        num_tokens = sum(len(entry.token_ids) for entry in self.tokens.values())
        return EVENT_BYTES * (len(self.events) + len(self.tokens)) + TOKEN_BYTES * num_tokens

    def add_tokens(
        self,
        leg: LegKey,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish: FinishReason | None,
    ) -> None:
        entry = self.tokens.get(leg)
        if entry is None:
            entry = node_pb2.SequenceTokens(
                session_id=leg.session.session_id, attempt=leg.attempt, first_index=first_index
            )
            self.tokens[leg] = entry
        assert first_index == entry.first_index + len(entry.token_ids), "tokens of a sequence are consecutive"
        entry.token_ids.extend(token_ids)
        entry.logprobs.extend(logprobs)
        entry.finish_reason = finish_to_pb(finish)

    def to_pb(self) -> node_pb2.StepOutput:
        return node_pb2.StepOutput(tokens=self.tokens.values(), events=self.events)
