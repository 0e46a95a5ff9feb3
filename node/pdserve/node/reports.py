"""What both schedulers say of a leg; the desk passes it on to `Legs`."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.core.ids import LegKey
from pdserve.core.work import LegOutcome


@dataclass(frozen=True, slots=True)
class ReportEnd:
    """Tell the router how the leg ended."""

    leg: LegKey
    outcome: LegOutcome
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReportRelease:
    """Tell the router that nothing is left of the leg: how long its parts took, and what it sent."""

    leg: LegKey
    durations_s: Mapping[str, float]
    kv_bytes: int = 0
    kv_frames: int = 0


LegReport = ReportEnd | ReportRelease
