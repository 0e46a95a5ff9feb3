"""One sequence's way from accepted tokens to what the client is shown.

A token is shown together with its text. Without stop texts every token is shown at once (only unfinished characters wait);
with them, a token is held while any of its text could still become part of a stop, and those that belong to a stop are
dropped: neither shown nor counted.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.core.work import SampledToken, TopLogprobs
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client may see now. `matched_stop` ends the sequence."""

    text: str = ""
    tokens: tuple[SampledToken, ...] = ()
    matched_stop: str | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.text or self.tokens)


def joined(pieces: Iterable[Shown]) -> Shown:
    """Return consecutive pieces as one."""
    text: list[str] = []
    tokens: list[SampledToken] = []
    matched = None
    for piece in pieces:
        text.append(piece.text)
        tokens += piece.tokens
        matched = piece.matched_stop
    return Shown("".join(text), tuple(tokens), matched)


@dataclass(frozen=True, slots=True)
class Gain:
    """What one sequence of a request gained."""

    sequence: int
    shown: Shown


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt with its natural log-probability, None for the first, and the likeliest tokens of its position."""

    token_id: int
    logprob: float | None
    top: TopLogprobs = ()


class OutputText:
    """Turns a sequence's tokens into shown text and tokens, in order."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._shows_at_once = not stops
        self._undecided: deque[SampledToken] = deque()
        self._decided: deque[tuple[int, SampledToken]] = deque()
        self._num_decoded_chars = 0
        self._num_shown_chars = 0
        self.num_shown_tokens = 0

    def push(self, token: SampledToken) -> Shown:
        """Take the next token and its text."""
        self._undecided.append(token)
        return self._take(self._detokenizer.push(token.token_id), self._detokenizer.num_undecided)

    def finish(self, last: SampledToken | None = None) -> Shown:
        """Take the end of the sequence; `last` is a token that ended it and whose text is not shown."""
        rest = self._take(self._detokenizer.finish(), 0)
        if rest.matched_stop is not None:
            return rest
        text = rest.text + self._stops.flush()
        tokens = [*rest.tokens, *(token for _, token in self._decided)]
        self._decided.clear()
        if last is not None:
            tokens.append(last)
        self.num_shown_tokens += len(tokens) - len(rest.tokens)
        return Shown(text, tuple(tokens))

    def _take(self, text: str, num_undecided: int) -> Shown:
        if self._shows_at_once:
            return self._show_all(text)
        self._num_decoded_chars += len(text)
        while len(self._undecided) > num_undecided:
            self._decided.append((self._num_decoded_chars, self._undecided.popleft()))
        step = self._stops.push(text)
        self._num_shown_chars += len(step.text)
        tokens = []
        while self._decided and self._decided[0][0] <= self._num_shown_chars:
            tokens.append(self._decided.popleft()[1])
        self.num_shown_tokens += len(tokens)
        if step.matched is not None:
            self._decided.clear()
            self._undecided.clear()
        return Shown(step.text, tuple(tokens), step.matched)

    def _show_all(self, text: str) -> Shown:
        tokens = tuple(self._undecided)
        self._undecided.clear()
        self.num_shown_tokens += len(tokens)
        return Shown(text, tokens)
