"""Which faults a KV link is given for experiments: `--kv-faults drop=0.01,corrupt@12,seed=7`.

`KIND=RATE` meets each frame with that probability, `KIND@K` meets the K-th frame that this process sends, counted from 1.
`hold=TIME` says how long delayed and reordered frames wait at most, `stall=RATE` makes a connection stand still for `pause=TIME`.
"""

from dataclasses import dataclass
from enum import StrEnum

from pdserve.core.errors import ConfigError
from pdserve.core.link_shape import parse_duration


class FaultKind(StrEnum):
    """What can happen to a frame on its way out."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    DELAY = "delay"
    """It comes later than it should; those after it overtake it."""
    REORDER = "reorder"
    """It changes places with the next frame on its connection."""
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    """One bit changes."""
    STALL = "stall"
    """Its connection carries nothing for a while, then everything in order."""
    DISCONNECT = "disconnect"
    """Its connection is lost, and the frame with it."""


@dataclass(frozen=True, slots=True)
class LinkFaults:
    """Faults by rate (0 to 1 per frame) and by number of the frame; the same seed gives the same faults."""

    rates: tuple[tuple[FaultKind, float], ...] = ()
    at: tuple[tuple[FaultKind, int], ...] = ()
    seed: int = 0
    hold_s: float = 0.02
    pause_s: float = 1.0

    def __str__(self) -> str:
        parts = [f"{kind}={rate:g}" for kind, rate in self.rates] + [f"{kind}@{number}" for kind, number in self.at]
        return ",".join([*parts, f"seed={self.seed}"])


def parse_link_faults(text: str | None) -> LinkFaults | None:
    """Return the faults that `text` names, None if there are none; raise ConfigError naming every part that is wrong."""
    if not text:
        return None
    rates: list[tuple[FaultKind, float]] = []
    at: list[tuple[FaultKind, int]] = []
    seed, times_s, wrong = 0, {"hold": 0.02, "pause": 1.0}, list[str]()
    for part in (part.strip() for part in text.split(",")):
        try:
            name, equals, value = part.partition("=")
            if name in times_s and equals:
                times_s[name] = parse_duration(value, "kv_faults")
            elif name == "seed" and equals:
                seed = int(value)
            elif equals:
                rates.append((FaultKind(name), _rate(value)))
            else:
                name, _, value = part.partition("@")
                at.append((FaultKind(name), _number(value)))
        except ConfigError as error:
            wrong += error.faults
        except ValueError:
            kinds = ", ".join(FaultKind)
            wrong.append(
                f"kv_faults: {part!r} is not KIND=RATE, KIND@FRAME, seed=, hold= or pause= with a kind of {kinds}"
            )
    if sum(rate for _, rate in rates) > 1:
        wrong.append("kv_faults: the rates together are more than 1")
    if wrong:
        raise ConfigError(wrong)
    return LinkFaults(tuple(rates), tuple(at), seed, times_s["hold"], times_s["pause"])


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 <= rate <= 1:
        raise ConfigError([f"kv_faults: a rate is between 0 and 1, not {text}"])
    return rate


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ConfigError([f"kv_faults: frames are counted from 1, not {text}"])
    return number
