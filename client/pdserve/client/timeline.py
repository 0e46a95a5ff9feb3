"""Where a request's time went. Documented in docs/timeline.md."""

from dataclasses import dataclass


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
    """Where the time went, on the router's clock: `stages` add up to `e2el_s`; seconds."""

    schema_version: int
    e2el_s: float
    ttft_s: float
    tpot_s: float
    stages: tuple[Stage, ...]
    overlapped: Overlapped
    attempts: int
    stalls: tuple[Stall, ...]
