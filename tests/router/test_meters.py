"""What Prometheus is told: every gauge, and each request once, by how it ended."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.core.errors import InvalidRequest, Overloaded, SlowReader
from pdserve.core.work import FinishReason
from pdserve.router.instructions import Answer, Finish
from pdserve.router.meters import Meters
from pdserve.router.timeline import StageName, TimelineRecorder
from pdserve.rpc.gauge_metrics import ROUTER_PREFIX, metric_name
from pdserve.v1 import node_pb2
from tests.router.client_calls import IDS, ask, failure, submits
from tests.router.http_calls import COMPLETIONS, body_of, http_stage, play, post

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
Samples = dict[str, float]


def samples_of(text: str) -> Samples:
    """Return every sample by its name and labels, less the model's."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "model_name")
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def answer_after(ttft_s: float, e2el_s: float, num_tokens: int) -> Answer:
    recorder = TimelineRecorder(0.0)
    recorder.enter(StageName.PREFILL, 1, 0.5)
    recorder.token(ttft_s)
    recorder.enter(StageName.DECODE, 1, ttft_s)
    if num_tokens > 1:
        recorder.overlap({"prefill.exposed_transfer": 0.25}, kv_bytes=4096)
    return Answer(3, 2, num_tokens, recorder.build(num_tokens, 1, e2el_s), *[None] * 2)  # type: ignore[arg-type] # nobody asks which nodes


def test_an_answer_is_told_once_in_every_series() -> None:
    meters = Meters("m", dict)
    meters.answered(answer_after(1.0, 5.0, 5), [Finish(0, FinishReason.STOP), Finish(1, FinishReason.LENGTH)])
    found = samples_of(meters.render().decode())
    assert found["pdserve_requests_total{outcome=finished,reason=LENGTH}"] == 1
    assert found["pdserve_prompt_tokens_total{}"] == 3
    assert found["pdserve_cached_prompt_tokens_total{}"] == 2
    assert found["pdserve_generation_tokens_total{}"] == 5
    assert found["pdserve_time_to_first_token_seconds_sum{}"] == 1.0
    assert found["pdserve_e2e_request_latency_seconds_sum{}"] == 5.0
    assert found["pdserve_request_time_per_output_token_seconds_sum{}"] == 1.0
    assert found["pdserve_request_stage_seconds_sum{stage=prefill}"] == 0.5
    assert found["pdserve_request_stage_seconds_sum{stage=decode}"] == 4.0
    assert found["pdserve_kv_transfer_exposed_seconds_sum{}"] == 0.25
    assert found["pdserve_kv_transfer_bytes_total{}"] == 4096


def test_one_token_has_no_time_per_token_and_no_transfer() -> None:
    meters = Meters("m", dict)
    meters.answered(answer_after(1.0, 1.0, 1), [Finish(0, FinishReason.LENGTH)])
    found = samples_of(meters.render().decode())
    assert "pdserve_request_time_per_output_token_seconds_count{}" not in found
    assert "pdserve_kv_transfer_exposed_seconds_count{}" not in found


def test_tokens_that_come_together_share_their_gap() -> None:
    meters = Meters("m", dict)
    meters.gained(0.3, 3)
    found = samples_of(meters.render().decode())
    assert found["pdserve_inter_token_latency_seconds_count{}"] == 3
    assert found["pdserve_inter_token_latency_seconds_sum{}"] == pytest.approx(0.3)
    assert found["pdserve_inter_token_latency_seconds_bucket{le=0.1}"] == 3


def test_bad_ends_are_told_by_name() -> None:
    meters = Meters("m", dict)
    meters.refused(Overloaded("full"))
    meters.failed(SlowReader("slow"))
    meters.cancelled()
    meters.refused(InvalidRequest("bad"))
    found = samples_of(meters.render().decode())
    ends = {key.partition("{")[2]: value for key, value in found.items() if key.startswith("pdserve_requests_total")}
    assert ends == {
        "outcome=refused,reason=OVERLOADED}": 1,
        "outcome=failed,reason=SLOW_READER}": 1,
        "outcome=cancelled,reason=}": 1,
        "outcome=refused,reason=INVALID_REQUEST}": 1,
    }


def test_gauges_are_read_when_asked_for() -> None:
    values = {"sessions.decoding": 1.0, "served_total": 5.0}
    meters = Meters("m", lambda: values)
    assert samples_of(meters.render().decode())["pdserve_router_sessions_decoding{}"] == 1.0
    values["sessions.decoding"] = 0.0
    found = samples_of(meters.render().decode())
    assert found["pdserve_router_sessions_decoding{}"] == 0.0
    assert found["pdserve_router_served_total{}"] == 5.0
    assert metric_name("nodes.ready", ROUTER_PREFIX) == "pdserve_router_nodes_ready"


def test_every_metric_is_documented() -> None:
    documented = set(re.findall(r"^\| `(pdserve_\w+)`", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    meters = Meters("m", dict)
    made = set()
    for family in meters.registry.collect():
        made.add(family.name + ("_total" if family.type == "counter" else ""))
    assert made == documented


@pytest.mark.asyncio
async def test_requests_of_both_fronts_are_told(tmp_path: Path) -> None:
    async with http_stage(tmp_path) as (stage, client):
        await post(client, COMPLETIONS, body_of(COMPLETIONS, stream=True), play(stage, IDS[:4]))
        call = ask(stage)
        await play(stage, IDS[:4])
        async for _ in call:
            pass
        await client.post(COMPLETIONS, json=body_of(COMPLETIONS, temperature=-1))
        await client.post(COMPLETIONS, json=body_of(COMPLETIONS, temperature="warm"))
        await failure(ask(stage, max_tokens=0))
        leaving = asyncio.create_task(client.post(COMPLETIONS, json=body_of(COMPLETIONS)))
        await submits(stage)
        leaving.cancel()
        for node in (stage.prefill[0], stage.decode[0]):
            node.released(await node.next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)
        await stage.leak_oracle()
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = samples_of(response.text)
        assert found["pdserve_requests_total{outcome=finished,reason=LENGTH}"] == 2
        assert found["pdserve_requests_total{outcome=refused,reason=INVALID_REQUEST}"] == 3
        assert found["pdserve_requests_total{outcome=cancelled,reason=}"] == 1
        assert found["pdserve_generation_tokens_total{}"] == 8
        assert found["pdserve_time_to_first_token_seconds_count{}"] == 2
        assert found["pdserve_http_requests_total{path=/v1/completions,status=200}"] == 1
        assert found["pdserve_http_requests_total{path=/v1/completions,status=400}"] == 2
        assert found["pdserve_router_served_total{}"] == 2
        assert found["pdserve_router_process_tasks{}"] > 0
