"""Places where a process can be made to stand still, so that tests can kill and cancel at an exact stage.

`--hold-at STAGE[:N]` is refused unless the environment says PDSERVE_TEST=1. A held request is simply passed over by its
scheduler: everything else, cancellation included, goes on. The gauge `held` counts the requests standing at the place. Only a
first attempt is held, so that a request which lost a node at the place is answered by whichever node gets it next.
"""

import os
from dataclasses import dataclass
from enum import StrEnum

from pdserve.core.errors import ConfigError


class HoldStage(StrEnum):
    """A stage of a request's walk."""

    QUEUED = "queued"
    """Prefill node: before the first chunk of a prompt."""
    PREFILLING = "prefilling"
    """Prefill node: after N chunks (default 1) of a prompt, if more remain."""
    HANDING_OVER = "handing_over"
    """Prefill node: the first token is sampled and reported; COMMIT is not sent."""
    DECODING = "decoding"
    """Decode node: the next token to be made has absolute output index >= N (default 4)."""


DEFAULT_AFTER = {HoldStage.PREFILLING: 1, HoldStage.DECODING: 4}


@dataclass(frozen=True, slots=True)
class Hold:
    """A stage, and how far into it."""

    stage: HoldStage
    after: int = 0

    def at(self, stage: HoldStage, attempt: int, progress: int = 0) -> bool:
        """Return whether a request at `stage` with `progress` stands still; attempts count from 1."""
        return attempt == 1 and stage is self.stage and progress >= self.after


def parse_hold(text: str | None) -> Hold | None:
    """Return the hold that `text` names (`STAGE` or `STAGE:N`); raise ConfigError if it is not allowed or not known."""
    if not text:
        return None
    if os.environ.get("PDSERVE_TEST") != "1":
        raise ConfigError(["hold_at: only for tests; set PDSERVE_TEST=1 to allow it"])
    name, _, after = text.partition(":")
    try:
        stage = HoldStage(name)
        return Hold(stage, int(after) if after else DEFAULT_AFTER.get(stage, 0))
    except ValueError:
        stages = ", ".join(HoldStage)
        raise ConfigError([f"hold_at: {text!r} is not STAGE or STAGE:N with a stage of {stages}"]) from None
