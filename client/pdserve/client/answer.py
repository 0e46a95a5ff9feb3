"""What comes back: parts as they arrive, and the whole answer that they make."""

from dataclasses import dataclass, field

from pdserve.client.request import ToolCall
from pdserve.client.timeline import Timeline
from pdserve.core.build import ProcessInfo
from pdserve.core.work import FinishReason

TopLogprobs = tuple[tuple[int, float], ...]
"""The most likely tokens of one position, best first: (token id, natural log-probability)."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A prompt's token with its natural log-probability, which the first one lacks, and its alternatives."""

    token_id: int
    logprob: float | None
    top_logprobs: TopLogprobs = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The next scores of the prompt, in order; all of them come before the first delta."""

    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What tool call `index` of a sequence gained; `id` and `name` come, whole, with its first delta."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sequence gained.

    `arrival_s` is the client's monotonic clock at arrival less its reading when the call was made, seconds. `logprobs` are
    natural, one per token id, and so are `top_logprobs` where they were asked for. `reasoning` and `tool_calls` are not part of
    `text`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    arrival_s: float
    sequence: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence is complete. `stop` is the matched stop text, `stop_token_id` the token that ended it."""

    reason: FinishReason
    stop: str = ""
    stop_token_id: int | None = None
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `completion_tokens` of all sequences together."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Closes an answer."""

    request_id: str
    model: str
    usage: Usage
    timeline: Timeline
    seed: int
    processes: tuple[ProcessInfo, ...]


Part = PromptScores | Delta | Finished | Summary


@dataclass(slots=True)
class Choice:
    """One sequence of an answer, collected from its deltas in the order of their arrival. `finished` is None until it ends."""

    sequence: int
    deltas: list[Delta] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(delta.reasoning for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        """All token ids so far."""
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """The natural log-probability of each token so far."""
        return [logprob for delta in self.deltas for logprob in delta.logprobs]

    @property
    def top_logprobs(self) -> list[TopLogprobs]:
        """The alternatives of each token so far; empty unless they were asked for."""
        return [top for delta in self.deltas for top in delta.top_logprobs]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls so far, whole or in the making, in their order."""
        calls: dict[int, ToolCall] = {}
        for gained in (gained for delta in self.deltas for gained in delta.tool_calls):
            old = calls.get(gained.index, ToolCall("", "", ""))
            calls[gained.index] = ToolCall(
                old.id or gained.id, old.name or gained.name, old.arguments + gained.arguments
            )
        return [calls[index] for index in sorted(calls)]


@dataclass(slots=True)
class Answer:
    """An answer, collected from its parts in the order of their arrival. `summary` is None until it is whole.

    What has no sequence in its name is about all sequences (`deltas`, `summary`) or about the first (`text`, `token_ids`,
    `finished`), which is the only one unless `n` was given.
    """

    deltas: list[Delta] = field(default_factory=list)
    prompt: list[ScoredToken] = field(default_factory=list)
    summary: Summary | None = None
    _choices: dict[int, Choice] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Take the next part."""
        match part:
            case PromptScores(tokens):
                self.prompt.extend(tokens)
            case Delta():
                self.deltas.append(part)
                self._choice(part.sequence).deltas.append(part)
            case Finished():
                self._choice(part.sequence).finished = part
            case Summary():
                self.summary = part

    @property
    def choices(self) -> list[Choice]:
        """The sequences that have begun, by their index."""
        return [self._choices[sequence] for sequence in sorted(self._choices)]

    @property
    def text(self) -> str:
        """All text of the first sequence so far."""
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        """All token ids of the first sequence so far."""
        return self._first.token_ids

    @property
    def finished(self) -> Finished | None:
        """How the first sequence ended; None while it goes on."""
        return self._first.finished

    @property
    def _first(self) -> Choice:
        return self._choices.get(0, Choice(0))

    def _choice(self, sequence: int) -> Choice:
        return self._choices.setdefault(sequence, Choice(sequence))


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of an input, by id and by name. `max_model_len`: longest prompt plus answer; 0 while no node is ready."""

    token_ids: tuple[int, ...]
    names: tuple[str, ...]
    max_model_len: int
