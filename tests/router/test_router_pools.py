"""Which nodes the router's process uses, and what it says of those that it does not."""

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.core.build import Role
from pdserve.core.errors import (
    InvalidRequest,
    NoNodes,
)
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import ask, failure
from tests.router.scripted_node import start_stage, until

pytestmark = pytest.mark.asyncio


async def test_a_role_given_wrong_is_refused_by_name(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        stage.prefill[0].role = Role.DECODE
        stage.prefill[0].hang_up()
        await stage.until("refused", 1)
        view = await stage.stub.GetClusterState(inference_pb2.GetClusterStateRequest())
        reasons = {node.address: node.reason for node in view.nodes}
        assert reasons[stage.prefill[0].address] == "decode address given as prefill"
        error = await failure(ask(stage))
        assert isinstance(error, NoNodes)
        assert "decode address given as prefill" in error.hint


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"tokenizer_digest": "other"}, "refused"),
        ({"refusal": NoNodes("the node is loading its model", retry_after_s=0.5)}, "loading"),
    ],
    ids=["another tokenizer", "loading"],
)
async def test_nodes_that_cannot_be_used_yet_or_at_all(tmp_path: Path, change: dict[str, object], state: str) -> None:
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        before = {name: getattr(stage.decode[0], name) for name in change}
        for name, value in change.items():
            setattr(stage.decode[0], name, value)
        stage.decode[0].hang_up()
        await stage.until(state, 1)
        assert not stage.router.membership.is_ready
        for name, value in before.items():
            setattr(stage.decode[0], name, value)
        await stage.until("ready", 2)


async def test_a_node_without_a_kv_link_gets_no_work(tmp_path: Path) -> None:
    """Failure class 27: attached is not enough; a transfer must be possible."""
    async with start_stage(tmp_path, num_decode=2) as stage:
        await stage.until("ready", 3)
        for node in (*stage.prefill, stage.decode[1]):
            node.links_up = False
        linked = [stage.decode[0].incarnation]
        await stage.decode[1].attach_anew()
        stage.prefill[0].say(status=node_pb2.NodeStatus(connected_peers=linked, num_free_blocks=100))
        await stage.until("connecting", 1)
        calls = [ask(stage) for _ in range(3)]
        for _ in calls:
            submit = await stage.decode[0].next_of("submit")
            stage.decode[0].released(submit, node_pb2.LEG_OUTCOME_REFUSED)
            stage.prefill[0].released(await stage.prefill[0].next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)
        for call in calls:
            assert isinstance(await failure(call), InvalidRequest)
        await stage.leak_oracle()


async def test_a_pair_that_can_never_work_is_told_with_what_differs(tmp_path: Path) -> None:
    """Nodes of different `--kv-wire` stood at "no KV link" for ever, and nothing said why."""
    async with start_stage(tmp_path) as stage:
        await stage.until("ready", 2)
        prefill, decode = stage.prefill[0], stage.decode[0]
        decode.weight_digest, decode.wire_dtype = "other weights", "int8"
        await decode.attach_anew()
        await stage.until("connecting", 2)
        why = stage.router.membership.why_empty()
        for node, other, label in ((prefill, decode, "decode"), (decode, prefill, "prefill")):
            differs = f"{other.address} differs in weight_digest, wire_dtypes"
            assert f"{node.address} is connecting (no KV link to any {label} node: {differs})" in why


async def test_health_tells_what_the_pools_allow(tmp_path: Path) -> None:
    async with start_stage(tmp_path) as stage:
        health = health_pb2_grpc.HealthStub(stage.channel)
        serving = health_pb2.HealthCheckResponse.SERVING

        async def check(service: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            return int(answer.status)

        assert await check("liveness") == serving

        async def is_ready() -> bool:
            return bool(await check("") == serving)

        async def is_not_ready() -> bool:
            return not await is_ready()

        await until(is_ready)
        stage.decode[0].weight_digest = "other weights"
        stage.decode[0].hang_up()
        await until(is_not_ready)


async def test_one_node_at_two_addresses_is_named(tmp_path: Path) -> None:
    async with start_stage(tmp_path, num_decode=2) as stage:
        await stage.until("ready", 3)
        stage.decode[1].incarnation = stage.decode[0].incarnation
        stage.decode[1].hang_up()
        await stage.until("refused", 1)
        reason = next(member.reason for member in stage.router.membership.members if member.state == "refused")
        assert reason == f"the same node as {stage.decode[0].address}"
