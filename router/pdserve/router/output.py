"""One sequence's way from accepted tokens to what the client is shown.

A token is shown together with its text. Without stop texts every token is shown at once (only unfinished characters wait);
with them, a token is held while any of its text could still become part of a stop, and those that belong to a stop are
dropped: neither shown nor counted. With `include_stop` the stop is part of the answer, up to its last character, and nothing is
held: every token up to the one that completed it is shown. Before output index `min_tokens` no stop may end: a character belongs
to the token that made it final. In an answer to a chat the text then runs through a reader, which parts it into content,
reasoning and tool calls; it may keep text back after the tokens were shown.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdserve.core.work import SampledToken, TopLogprobs
from pdserve.router.chat.answer import AnswerReader
from pdserve.router.chat.gains import AnswerGain, ToolCallGain, merged_calls
from pdserve.router.detokenizer import Detokenizer
from pdserve.router.stops import StopMatcher, StopStep


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client may see now. `matched_stop` ends the sequence; `reasoning` and `tool_calls` are no part of `text`."""

    text: str = ""
    tokens: Sequence[SampledToken] = ()
    matched_stop: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallGain, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.text or self.tokens or self.reasoning or self.tool_calls)

    @property
    def num_text_bytes(self) -> int:
        """Bytes of all text in it."""
        calls = sum(len(call.id) + len(call.name.encode()) + len(call.arguments.encode()) for call in self.tool_calls)
        return len(self.text.encode()) + len(self.reasoning.encode()) + calls


def joined(pieces: Iterable[Shown]) -> Shown:
    """Return consecutive pieces as one."""
    text: list[str] = []
    tokens: list[SampledToken] = []
    reasoning: list[str] = []
    calls: list[ToolCallGain] = []
    matched = None
    for piece in pieces:
        text.append(piece.text)
        tokens += piece.tokens
        reasoning.append(piece.reasoning)
        calls += piece.tool_calls
        matched = piece.matched_stop
    return Shown("".join(text), tuple(tokens), matched, "".join(reasoning), merged_calls(calls))


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
    """Turns a sequence's tokens into shown text and tokens, in order. Without a `reader` all text stays text."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        reader: AnswerReader | None = None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._reader = reader
        self._stops = StopMatcher(stops, include=include_stop, num_exempt=min_tokens)
        self._include_stop = include_stop
        self._shows_at_once = include_stop or not stops
        self._undecided: deque[SampledToken] = deque()
        self._decided: deque[tuple[int, SampledToken]] = deque()
        self._num_decoded_chars = 0
        self._num_shown_chars = 0
        self.num_shown_tokens = 0

    def push(self, token: SampledToken) -> Shown:
        """Take the next token and its text."""
        self._undecided.append(token)
        shown = self._take(self._detokenizer.push(token.token_id), self._detokenizer.num_undecided)
        return self._read(shown, is_end=shown.matched_stop is not None)

    def finish(self, last: SampledToken | None = None) -> Shown:
        """Take the end of the sequence; `last` is a token that ended it. Its text is shown only with `include_stop`."""
        if last is not None and self._include_stop:
            shown = self.push(last)
            if shown.matched_stop is not None:
                return shown
            return joined((shown, self.finish()))
        return self._read(self._rest(last), is_end=True)

    def _read(self, shown: Shown, *, is_end: bool) -> Shown:
        if self._reader is None:
            return shown
        gains = [self._reader.push(shown.text)]
        if is_end:
            gains.append(self._reader.finish())
        return joined([replace(shown, text=""), *(_shown_of(gain, shown.matched_stop) for gain in gains)])

    def _rest(self, last: SampledToken | None) -> Shown:
        rest = self._take(self._detokenizer.finish(), 0, is_rest=True)
        if rest.matched_stop is not None:
            return rest
        text = rest.text + self._stops.flush()
        tokens = [*rest.tokens, *(token for _, token in self._decided)]
        self._decided.clear()
        if last is not None:
            tokens.append(last)
        self.num_shown_tokens += len(tokens) - len(rest.tokens)
        return Shown(text, tuple(tokens))

    def _take(self, text: str, num_undecided: int, *, is_rest: bool = False) -> Shown:
        step = self._stops.push(text, is_rest=is_rest)
        if self._shows_at_once:
            return self._show_all(step)
        self._num_decoded_chars += len(text)
        while len(self._undecided) > num_undecided:
            self._decided.append((self._num_decoded_chars, self._undecided.popleft()))
        self._num_shown_chars += len(step.text)
        tokens = []
        while self._decided and self._decided[0][0] <= self._num_shown_chars:
            tokens.append(self._decided.popleft()[1])
        self.num_shown_tokens += len(tokens)
        if step.matched is not None:
            self._decided.clear()
            self._undecided.clear()
        return Shown(step.text, tuple(tokens), step.matched)

    def _show_all(self, step: StopStep) -> Shown:
        tokens = tuple(self._undecided)
        self._undecided.clear()
        self.num_shown_tokens += len(tokens)
        return Shown(step.text, tokens, step.matched)


def _shown_of(gain: AnswerGain, matched_stop: str | None) -> Shown:
    return Shown(gain.content, (), matched_stop, gain.reasoning, gain.tool_calls)
