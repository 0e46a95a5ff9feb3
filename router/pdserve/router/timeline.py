"""Where a request's time went: a partition of its end-to-end latency by cuts on the router's monotonic clock.

Formulas and clocks stand in docs/timeline.md. Time is passed in.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

SCHEMA_VERSION = 1


class StageName(StrEnum):
    """The parts of the partition."""

    ADMISSION = "admission"
    """Request parsed → prompt tokenized and session opened."""
    PLACEMENT = "placement"
    """→ submitted to the nodes of the first attempt."""
    PREFILL = "prefill"
    """→ first token of the attempt arrived."""
    HANDOVER = "handover"
    """→ the decode node adopted the KV."""
    DECODE = "decode"
    """→ last token arrived."""
    RESUME = "resume"
    """An attempt ended → the next one was submitted."""
    ANSWER = "answer"
    """Last token arrived → summary built."""


@dataclass(frozen=True, slots=True)
class NodeDuration:
    """Time that a node measured on its own clock, seconds."""

    name: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the partition, on the router's clock, with what nodes report of it."""

    name: StageName
    attempt: int
    duration_s: float
    nodes: tuple[NodeDuration, ...] = ()

    @property
    def hop_s(self) -> float:
        """What no node measured: network, queues between processes. Seconds."""
        return self.duration_s - sum(node.duration_s for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Stall:
    """An attempt that ended before the answer was complete; the time until the next attempt's first token or its end, seconds."""

    attempt: int
    cause: str
    duration_s: float


@dataclass(slots=True)
class Overlapped:
    """Work beside the stages: seconds on the nodes' clocks, and what travelled. Sums over all attempts."""

    exposed_transfer_s: float = 0.0
    pack_s: float = 0.0
    reserve_wait_s: float = 0.0
    place_s: float = 0.0
    stalled_s: float = 0.0
    kv_bytes: int = 0
    kv_frames: int = 0
    nodes: list[NodeDuration] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The finished record. The durations of `stages` add up to `e2el_s`."""

    e2el_s: float
    ttft_s: float
    tpot_s: float
    stages: tuple[Stage, ...]
    overlapped: Overlapped
    attempts: int
    stalls: tuple[Stall, ...]


@dataclass(slots=True)
class _OpenStage:
    name: StageName
    attempt: int
    entered_s: float
    left_s: float | None = None
    nodes: dict[str, float] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """How long it lasted; 0 while it runs."""
        return 0.0 if self.left_s is None else self.left_s - self.entered_s


OVERLAPPED_NAMES = frozenset(
    {"prefill.exposed_transfer", "prefill.pack", "prefill.stalled", "decode.reserve_wait", "decode.place"}
)
"""Durations that overlap the stages and are never nested in one."""

ROUNDING_S = 1e-9
MAY_OVERLAP = frozenset({StageName.HANDOVER, StageName.DECODE})
"""Stages whose work may begin before the router hears of their start: another node's message tells it."""


class TimelineRecorder:
    """Takes cuts as they happen; `build` returns the record."""

    def __init__(self, received_s: float) -> None:
        self._received_s = received_s
        self._stages = [_OpenStage(StageName.ADMISSION, 0, received_s)]
        self._first_token_s: float | None = None
        self._overlapped = Overlapped()
        self._stalls: list[tuple[int, str, float, float | None]] = []

    def fork(self) -> "TimelineRecorder":
        """Return a copy for a session that takes over some of the sequences: until now, both have the same story."""
        return copy.deepcopy(self)

    def enter(self, name: StageName, attempt: int, now_s: float) -> None:
        """Cut: the running stage ends and the next one begins."""
        self._stages[-1].left_s = now_s
        self._stages.append(_OpenStage(name, attempt, now_s))

    def token(self, now_s: float) -> None:
        """Say that an attempt's first token arrived."""
        if self._first_token_s is None:
            self._first_token_s = now_s
        self._end_stall(now_s)

    def attempt_ended(self, attempt: int, cause: str, now_s: float) -> None:
        """Say that an attempt ended before the answer was complete. If it gave nothing, its own stall follows the last one."""
        self._end_stall(now_s)
        self._stalls.append((attempt, cause, now_s, None))

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, seconds; None without one."""
        return None if self._first_token_s is None else self._first_token_s - self._received_s

    def nest(self, name: StageName, attempt: int, durations_s: Mapping[str, float]) -> None:
        """Put durations that a node measured into the attempt's stage; a later report replaces an earlier one."""
        for stage in self._stages:
            if stage.name is name and stage.attempt == attempt:
                stage.nodes.update((key, value) for key, value in durations_s.items() if key not in OVERLAPPED_NAMES)

    def overlap(self, durations_s: Mapping[str, float], kv_bytes: int = 0, kv_frames: int = 0) -> None:
        """Add what ran beside the stages."""
        beside = self._overlapped
        beside.exposed_transfer_s += durations_s.get("prefill.exposed_transfer", 0.0)
        beside.pack_s += durations_s.get("prefill.pack", 0.0)
        beside.reserve_wait_s += durations_s.get("decode.reserve_wait", 0.0)
        beside.stalled_s += durations_s.get("prefill.stalled", 0.0)
        beside.place_s += durations_s.get("decode.place", 0.0)
        beside.kv_bytes += kv_bytes
        beside.kv_frames += kv_frames

    def build(self, num_tokens: int, attempts: int, now_s: float) -> Timeline:
        """Return the record at `now_s`; the last stage ends here."""
        self._stages[-1].left_s = now_s
        self._date_adoption_back()
        e2el_s = now_s - self._received_s
        ttft_s = e2el_s if self.ttft_s is None else self.ttft_s
        return Timeline(
            e2el_s=e2el_s,
            ttft_s=ttft_s,
            tpot_s=(e2el_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0,
            stages=tuple(self._close(stage) for stage in self._stages),
            overlapped=self._overlapped,
            attempts=attempts,
            stalls=tuple(
                Stall(attempt, cause, (now_s if resumed_s is None else resumed_s) - since_s)
                for attempt, cause, since_s, resumed_s in self._stalls
            ),
        )

    def _end_stall(self, now_s: float) -> None:
        if self._stalls and self._stalls[-1][3] is None:
            self._stalls[-1] = (*self._stalls[-1][:3], now_s)

    def _date_adoption_back(self) -> None:
        """Move the cut between handover and decode to where it must have been at the latest.

        The decode node's work lies between `adopted` and the last token. If it took longer than the router saw between the two,
        the word `adopted` came late: it was true at least that long before the last token arrived. One clock for each
        duration, and none is subtracted from another host's.
        """
        for before, stage in itertools.pairwise(self._stages):
            if stage.name is not StageName.DECODE or before.name is not StageName.HANDOVER:
                continue
            late_s = sum(stage.nodes.values()) - stage.duration_s
            if 0 < late_s + ROUNDING_S <= before.duration_s:
                before.left_s = stage.entered_s = stage.entered_s - late_s - ROUNDING_S

    def _close(self, stage: _OpenStage) -> Stage:
        """Return the finished stage. What cannot lie inside it is reported beside the sum, whole."""
        nodes = tuple(NodeDuration(name, value) for name, value in stage.nodes.items())
        if stage.name in MAY_OVERLAP and sum(node.duration_s for node in nodes) > stage.duration_s:
            self._overlapped.nodes += nodes
            nodes = ()
        return Stage(stage.name, stage.attempt, stage.duration_s, nodes)
