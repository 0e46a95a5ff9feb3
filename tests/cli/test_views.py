"""What people see of a cluster, a request and a machine, also in 80 columns."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from pdserve.cli.doctor import Finding, Verdict, finding_view
from pdserve.cli.status import Look, node_load, router_load, state_view
from pdserve.cli.timeline_view import BAR_CELLS, bar_of, nested_in, timeline_view
from pdserve.client.cluster import ClusterState, ModelCard, NodeView, SessionView
from pdserve.client.pb import summary_from_pb
from pdserve.client.timeline import Stage
from pdserve.client.unreachable import essence_of
from pdserve.core.build import ProcessInfo, Role
from pdserve.core.ids import Incarnation
from tests.client.stub_router import SUMMARY

REFUSED = (
    "unavailable: failed to connect to all addresses; last error: UNKNOWN: ipv4:10.20.30.40:50061: Failed to connect to "
    "remote host: Connection refused (111)"
)


def shown(view: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def process(role: Role, version: str = "0.1.0") -> ProcessInfo:
    return ProcessInfo(role, Incarnation(b"i" * 16), version, "abc", "float32", 2, 16, "fe" * 32, "cpu")


def node(address: str, role: Role, **gauges: float) -> NodeView:
    named = {name.replace("__", "."): value for name, value in gauges.items()}
    return NodeView(address, "ready", "", process(role), named)


BUSY = node(
    "10.20.30.40:50061", Role.PREFILL, prefill__running=3, prefill__waiting=1, blocks__total=1024, blocks__free=12
)
STATE = ClusterState(
    router=process(Role.ROUTER),
    nodes=(
        BUSY,
        node("10.20.30.41:50061", Role.DECODE, decode__running=2, decode__receiving=1, blocks__total=9, blocks__free=9),
        NodeView("10.20.30.42:50061", "down", REFUSED, None, {}),
    ),
    gauges={"admitted": 3, "waiting": 1, "served_total": 1234},
    sessions=(SessionView(4, "label", "DECODING", 1, 0.5, 1),),
)
LOOK = Look("10.20.30.39:50051", STATE, (ModelCard("m", 8192, 9, True),), True)


def test_status_keeps_addresses_and_words_whole_at_80_columns() -> None:
    lines = shown(state_view(LOOK)).splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["router", "10.20.30.39:50051", "ready"],
        ["prefill", "10.20.30.40:50061", "ready"],
        ["decode", "10.20.30.41:50061", "ready"],
        ["?", "10.20.30.42:50061", "down"],
    ]
    told = "\n".join(lines)
    for text in (
        "open 3, waiting 1, served 1,234",
        "running 3, waiting 1, 1012/1024 blocks",
        "running 2, receiving 1, 0/9 blocks",
        "10.20.30.42:50061 is down: connection refused",
        "version: 0.1.0 (abc)",
        "engine:  float32 on cpu, blocks of 16, 2 threads",
        "weights: fefefefefefe",
        "m (up to 8,192 tokens)",
        "4 DECODING, attempt 1, 1 token, 0.5 s, label",
    ):
        assert text in told
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_status_names_each_process_where_versions_differ() -> None:
    other = replace(BUSY, process=process(Role.PREFILL, "0.2.0"))
    told = shown(state_view(replace(LOOK, state=replace(STATE, nodes=(other,)))))
    assert "version: 0.1.0 (abc)  10.20.30.39:50051" in told
    assert "version: 0.2.0 (abc)  10.20.30.40:50061" in told


@pytest.mark.parametrize(
    ("gauges", "is_ready", "said"),
    [
        ({}, True, "ready"),
        ({}, False, "not ready"),
        ({"draining": 1.0}, True, "draining"),
        ({"draining": 0.0}, True, "ready"),
    ],
)
def test_status_says_how_the_router_is(gauges: dict[str, float], is_ready: bool, said: str) -> None:
    seen = replace(LOOK, state=replace(STATE, gauges=gauges), is_ready=is_ready)
    assert seen.router_state == said
    assert f" {said} " in shown(state_view(seen)).splitlines()[1]


def test_model_without_a_node_has_no_length() -> None:
    told = shown(state_view(replace(LOOK, models=(ModelCard("m", 0, 9, True),))))
    assert "m (no node yet)" in told


def test_idle_load_is_told_as_that() -> None:
    assert router_load({"sessions": 0.0, "clients": 0.0}) == "idle"
    assert node_load(node("a:1", Role.DECODE, decode__over=3, blocks__total=4, blocks__free=1, blocks__cached=3)) == (
        "idle, 0/4 blocks"
    )


def test_long_words_of_the_transport_come_down_to_their_essence() -> None:
    assert essence_of(REFUSED) == "connection refused"
    assert essence_of("weights differ: a, b") == "weights differ: a, b"


def test_timeline_shows_every_stage_nested_parts_and_totals() -> None:
    told = shown(timeline_view(summary_from_pb(SUMMARY)), 120)
    for text in (
        "prefill (attempt 1)",
        "prefill.compute",
        "hop",
        "decode",
        "500.0",
        "25%",
        "1.0 MiB in 4 frames",
        "place 30.0 ms",
        "began before their stage: decode.queue 40.0 ms",
        "750.0 ms per token",
        "3 prompt tokens (1 cached), 3 answer tokens",
        "decode_lost",
    ):
        assert text in told


def test_single_token_has_no_time_per_token_and_no_plural() -> None:
    whole = summary_from_pb(SUMMARY)
    told = shown(timeline_view(replace(whole, usage=replace(whole.usage, prompt_tokens=1, completion_tokens=1))), 120)
    assert "per token" not in told
    assert "1 prompt token (1 cached), 1 answer token\n" in told.replace("  ", "")


def test_nested_durations_have_one_order() -> None:
    durations = [("d.compute", 1.0), ("d.zeal", 2.0), ("d.queue", 3.0), ("d.art", 4.0), ("d.wait", 5.0)]
    for nodes in (durations, durations[::-1]):
        names = [name for name, _ in nested_in(Stage("decode", 1, 9.0, tuple(nodes), 0.5))]
        assert names == ["d.queue", "d.wait", "d.compute", "d.art", "d.zeal", "hop"]
    assert nested_in(Stage("decode", 1, 9.0, (), 9.0)) == []


def test_bars_follow_each_other_and_never_leave_their_column() -> None:
    assert bar_of(0.0, 1.0, 2.0) == "█" * (BAR_CELLS // 2)
    assert bar_of(1.0, 1.0, 2.0) == " " * (BAR_CELLS // 2) + "█" * (BAR_CELLS // 2)
    assert bar_of(2.0, 0.0, 2.0) == " " * (BAR_CELLS - 1) + "█"
    assert bar_of(0.0, 0.0, 0.0) == ""


def test_finding_is_wrapped_within_its_column() -> None:
    lines = shown(finding_view(Finding("cache", Verdict.WARN, "fact " * 20, "advice " * 20)), 60).splitlines()
    assert lines[0].startswith("warn cache          fact")
    assert all(line.startswith(" " * 20) for line in lines[1:])
    arrow = next(i for i, line in enumerate(lines) if "→" in line)
    assert lines[arrow + 1].startswith(" " * 22 + "advice")
