"""How a KV link is slowed down for experiments: `--kv-link BANDWIDTH,LATENCY[,JITTER]`, e.g. `10Gbps,2ms,0.1ms`."""

import math
import re
from dataclasses import dataclass

from pdserve.core.errors import ConfigError

_BITS = {"bps": 1.0, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
UNLIMITED = "unlimited"
LONGEST_LATENCY_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What one direction of a link does to its frames. It never changes their order.

    `bits_per_s` may be infinite. After its last bit left, a frame takes `latency_s` plus a share of `jitter_s`, uniform from 0.
    """

    bits_per_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0

    def __str__(self) -> str:
        rate = UNLIMITED if math.isinf(self.bits_per_s) else f"{self.bits_per_s / 1e6:g}Mbps"
        return f"{rate},{self.latency_s * 1e3:g}ms,{self.jitter_s * 1e3:g}ms"


def parse_link_shape(text: str | None) -> LinkShape | None:
    """Return the shape that `text` names, None if there is none; raise ConfigError naming the part that is wrong."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not 2 <= len(parts) <= 3:
        raise ConfigError([f"kv_link: {text!r} is not BANDWIDTH,LATENCY[,JITTER], e.g. 10Gbps,2ms"])
    unlimited = parts[0].lower() == UNLIMITED
    bits_per_s = math.inf if unlimited else _quantity(parts[0], _BITS, "bandwidth", "10Gbps or unlimited")
    latency_s, jitter_s = (parse_duration(part) for part in (parts[1], parts[2] if len(parts) == 3 else "0ms"))
    if bits_per_s <= 0:
        raise ConfigError(["kv_link: the bandwidth must be more than 0"])
    return LinkShape(bits_per_s, latency_s, jitter_s)


def parse_duration(text: str, name: str = "kv_link") -> float:
    """Return seconds of e.g. `2ms`; raise ConfigError naming `name`, the setting, for anything else."""
    seconds = _quantity(text, _SECONDS, "duration", "2ms", name)
    if seconds > LONGEST_LATENCY_S:
        raise ConfigError([f"{name}: {text!r} is longer than {LONGEST_LATENCY_S:g} s"])
    return seconds


def _quantity(text: str, units: dict[str, float], what: str, example: str, name: str = "kv_link") -> float:
    match = _NUMBER.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError([f"{name}: {text!r} is no {what}; write it like {example} ({', '.join(units)})"])
    return float(match[1]) * factor
