"""The accepted output of one sequence: tokens by absolute index, each once and in order, whatever order they come in."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.core.work import FinishReason, SampledToken
from pdserve.router.output import OutputText, Shown, joined


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ended. `by_node` is False when only the router knows, so that the nodes must be told."""

    reason: FinishReason
    by_node: bool
    stop: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class EndRules:
    """What ends the sequence, besides stop texts."""

    max_tokens: int
    stop_token_ids: frozenset[int]
    ignore_eos: bool


class Sequence:
    """Orders tokens, drops duplicates, finds the end, and hands what may be shown to `output`.

    Tokens that come ahead of a missing one are kept for the running attempt; they are at most `max_tokens`.
    """

    def __init__(self, rules: EndRules, output: OutputText) -> None:
        self._rules = rules
        self._output = output
        self._early: dict[int, SampledToken] = {}
        self.token_ids = array("I")
        self.end: End | None = None
        self.num_duplicates = 0

    @property
    def num_shown_tokens(self) -> int:
        """Tokens that the client was given."""
        return self._output.num_shown_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens that may still come, as far as `max_tokens` goes."""
        return self._rules.max_tokens - len(self.token_ids)

    def drop_early(self) -> None:
        """Forget tokens that came ahead of a missing one: their attempt is over."""
        self._early.clear()

    def accept(self, tokens: Iterable[SampledToken], eos_token_ids: frozenset[int]) -> Shown:
        """Take tokens in any order, and return what the client may see now."""
        for token in tokens:
            if token.index < len(self.token_ids) or token.index in self._early or self.end is not None:
                self.num_duplicates += 1
            elif token.index < self._rules.max_tokens:
                self._early[token.index] = token
        pieces: list[Shown] = []
        while self.end is None and (next_token := self._early.pop(len(self.token_ids), None)) is not None:
            pieces.append(self._take(next_token, eos_token_ids))
        if self.end is not None:
            self._early.clear()
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def _take(self, token: SampledToken, eos_token_ids: frozenset[int]) -> Shown:
        self.token_ids.append(token.token_id)
        reason = token.finish_reason or self._own_reason(token, eos_token_ids)
        by_node = token.finish_reason is not None
        if reason is FinishReason.STOP:
            rest = self._output.finish(token)
            self.end = _end_of(rest, End(reason, by_node, stop_token_id=token.token_id))
            return rest
        shown = self._output.push(token)
        if shown.matched_stop is None and reason is not None:
            rest = self._output.finish()
            shown = joined((shown, rest))
            self.end = _end_of(shown, End(reason, by_node))
        elif shown.matched_stop is not None:
            self.end = End(FinishReason.STOP_SEQUENCE, by_node, stop=shown.matched_stop)
        return shown

    def _own_reason(self, token: SampledToken, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Apply the nodes' own rule, so that an answer whose end was lost is never resumed."""
        is_eos = not self._rules.ignore_eos and token.token_id in eos_token_ids
        if is_eos or token.token_id in self._rules.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if token.index + 1 >= self._rules.max_tokens else None


def _end_of(shown: Shown, otherwise: End) -> End:
    if shown.matched_stop is None:
        return otherwise
    return End(FinishReason.STOP_SEQUENCE, otherwise.by_node, stop=shown.matched_stop)
