"""What `--kv-link` and `--kv-faults` take, and how they refuse the rest by name."""

import math

import pytest

from pdserve.core.errors import ConfigError
from pdserve.core.link_faults import FaultKind, LinkFaults, parse_link_faults
from pdserve.core.link_shape import LinkShape, parse_link_shape
from pdserve.core.node_settings import DecodeSettings, NodeSettings, PrefillSettings
from pdserve.core.settings import load_settings


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (None, None),
        ("", None),
        ("10Gbps,2ms", LinkShape(1e10, 0.002)),
        ("10gbps, 2ms, 0.1ms", LinkShape(1e10, 0.002, 0.0001)),
        ("unlimited,500us", LinkShape(math.inf, 0.0005)),
        ("100 Mbps,0s", LinkShape(1e8)),
    ],
)
def test_a_shape(text: str | None, shape: LinkShape | None) -> None:
    parsed = parse_link_shape(text)
    assert (parsed is None) is (shape is None)
    if parsed is not None and shape is not None:
        assert (parsed.bits_per_s, parsed.latency_s, parsed.jitter_s) == pytest.approx(
            (shape.bits_per_s, shape.latency_s, shape.jitter_s)
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10Gbps", "BANDWIDTH,LATENCY"),
        ("10Gbps,2ms,1ms,1ms", "BANDWIDTH,LATENCY"),
        ("10GB,2ms", "no bandwidth"),
        ("10Gbps,2", "no duration"),
        ("0bps,2ms", "more than 0"),
        ("-1Gbps,2ms", "no bandwidth"),
        ("10Gbps,120s", "longer than 60 s"),
        ("nan,2ms", "no bandwidth"),
    ],
)
def test_no_shape(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_link_shape(text)


def test_faults() -> None:
    assert parse_link_faults("") is None
    assert parse_link_faults("drop=0.01, corrupt@12, seed=7, hold=5ms, pause=2s") == LinkFaults(
        ((FaultKind.DROP, 0.01),), ((FaultKind.CORRUPT, 12),), 7, 0.005, 2.0
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lose=0.1", "lose=0.1"),
        ("drop", "KIND=RATE"),
        ("drop=2", "between 0 and 1"),
        ("drop=nan", "between 0 and 1"),
        ("drop@0", "counted from 1"),
        ("drop=0.6,corrupt=0.6", "more than 1"),
        ("pause=soon", "no duration"),
        ("seed=x", "seed=x"),
    ],
)
def test_no_faults(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_link_faults(text)


def test_every_wrong_part_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_link_faults("drop=2,lose=1,drop@0")
    assert len(raised.value.faults) == 3


@pytest.mark.parametrize("kind", [PrefillSettings, DecodeSettings])
def test_a_node_names_the_option_that_is_wrong(kind: type[NodeSettings]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(kind, {"kv_link": "fast", "kv_faults": "lose=1"})
    assert any("--kv-link" in fault and "BANDWIDTH" in fault for fault in raised.value.faults), raised.value.faults
    assert any("--kv-faults" in fault and "lose=1" in fault for fault in raised.value.faults)
    assert load_settings(kind, {"kv_link": "1Gbps,1ms"}).kv_link == "1Gbps,1ms"
