"""What comes back: deltas as they arrive, then one end per sequence, then one summary."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.core.build import ProcessInfo
from pdserve.core.work import FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """What the sequence gained.

    `arrival_s` is the client's monotonic clock at arrival less its reading when the call was made, seconds. `logprobs` are
    natural, one per token id.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence is complete. `stop` is the matched stop text, `stop_token_id` the token that ended it."""

    reason: FinishReason
    stop: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the partition of a request's whole latency. `nodes` nest inside it; `hop_s` is what they leave."""

    name: str
    attempt: int
    duration_s: float
    nodes: tuple[tuple[str, float], ...]
    hop_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """An attempt that ended early, why, and for how long the answer stood still, seconds."""

    attempt: int
    cause: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Work beside the partition; seconds, bytes and frames."""

    exposed_transfer_s: float
    kv_bytes: int
    kv_frames: int
    pack_s: float
    reserve_wait_s: float
    place_s: float
    stalled_s: float
    nodes: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the time went, on the router's clock: `stages` add up to `e2el_s`. Documented in docs/timeline.md."""

    schema_version: int
    e2el_s: float
    ttft_s: float
    tpot_s: float
    stages: tuple[Stage, ...]
    overlapped: Overlapped
    attempts: int
    stalls: tuple[Stall, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """Closes an answer."""

    request_id: str
    model: str
    usage: Usage
    timeline: Timeline
    seed: int
    processes: tuple[ProcessInfo, ...]


@dataclass(slots=True)
class Answer:
    """A whole answer, collected from its parts in the order of their arrival."""

    deltas: list[Delta] = field(default_factory=list)
    finished: Finished | None = None
    summary: Summary | None = None

    def add(self, part: Delta | Finished | Summary) -> None:
        """Take the next part."""
        if isinstance(part, Delta):
            self.deltas.append(part)
        elif isinstance(part, Finished):
            self.finished = part
        else:
            self.summary = part

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        """All token ids so far."""
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model; lengths and sizes in tokens."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as the router sees it. `process` is None until it said hello."""

    address: str
    state: str
    reason: str
    process: ProcessInfo | None
    gauges: Mapping[str, float]
    kv_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionView:
    """An open session."""

    session_id: int
    request_id: str
    state: str
    attempt: int
    age_s: float
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A router, its nodes and its open sessions."""

    router: ProcessInfo
    nodes: tuple[NodeView, ...]
    gauges: Mapping[str, float]
    sessions: tuple[SessionView, ...]
