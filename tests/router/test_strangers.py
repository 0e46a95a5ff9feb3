"""What people without an operator's key are told: never an address of a node, nor another's label or prompt."""

from pathlib import Path

import pytest

from pdserve.core.errors import AttemptsExhausted, NoNodes
from pdserve.core.ids import Incarnation
from tests.router.client_calls import IDS, ask, failure, submits
from tests.router.http_calls import COMPLETIONS, body_of, http_stage, post
from tests.router.scripted_node import DEADLINE_S, Stage, until

pytestmark = pytest.mark.asyncio
USE, OPERATE = "key-of-ann-to-use-it", "key-of-the-operator"


def keys_in(folder: Path) -> str:
    path = folder / "keys"
    path.write_text(f"ann use {USE}\nops operate {OPERATE}\n")
    return str(path)


def names_a_node(stage: Stage, text: str) -> bool:
    return any(str(node.port) in text or node.address in text for node in (*stage.prefill, *stage.decode))


async def test_why_nothing_is_served_names_nodes_to_operators_only(tmp_path: Path) -> None:
    async with http_stage(tmp_path, api_keys_file=keys_in(tmp_path), queue_wait_s=0.1) as (stage, client):
        await stage.decode[0].stop()
        await stage.until("down", 1)
        for key, is_operator in ((USE, False), (OPERATE, True)):
            headers = {"authorization": f"Bearer {key}"}
            error = await failure(ask(stage, key=key))
            assert isinstance(error, NoNodes)
            health = await client.get("/health", headers=headers)
            whole = await client.post(COMPLETIONS, json=body_of(COMPLETIONS), headers=headers)
            streamed = await client.post(COMPLETIONS, json=body_of(COMPLETIONS, stream=True), headers=headers)
            assert (health.status_code, whole.status_code, streamed.status_code) == (503, 503, 503)
            for text in (str(error), health.text, whole.text, streamed.text):
                assert names_a_node(stage, text) == is_operator
        for headers in ({}, {"authorization": "Bearer wrong"}):
            health = await client.get("/health", headers=headers)
            assert health.json() == {"status": "not ready", "reason": "no prefill and decode node are ready"}


@pytest.mark.parametrize("key", [USE, OPERATE])
async def test_a_request_that_waited_in_vain_is_told_the_same(tmp_path: Path, key: str) -> None:
    async with http_stage(tmp_path, api_keys_file=keys_in(tmp_path)) as (stage, _):
        router = stage.router
        router.membership.doubt(Incarnation(stage.decode[0].incarnation), router._clock.now_s() + DEADLINE_S)
        call = ask(stage, key=key)
        await until(lambda: router.sessions.gauges()["waiting"] == 1)
        await stage.decode[0].stop()
        error = await failure(call)
        assert isinstance(error, NoNodes)
        assert error.message == "no prefill node is ready", "it has no peer to hand over to"
        assert names_a_node(stage, str(error)) == (key == OPERATE)


@pytest.mark.parametrize("key", [USE, OPERATE])
async def test_how_an_attempt_ended_is_a_name_and_the_rest_is_for_operators(tmp_path: Path, key: str) -> None:
    """A lost node's reason is gRPC's own text, which may hold its address; it stood in errors and in the timeline."""
    async with http_stage(tmp_path, api_keys_file=keys_in(tmp_path), max_attempts=1) as (stage, _):
        call = ask(stage, key=key)
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        await stage.decode[0].stop()
        error = await failure(call)
        assert isinstance(error, AttemptsExhausted)
        assert error.message == "1 attempts failed; the last: decode_lost"
        assert bool(error.hint) == (key == OPERATE)
        stage.prefill[0].released(submit)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_so_over_http_too(tmp_path: Path, stream: bool) -> None:
    async with http_stage(tmp_path, api_keys_file=keys_in(tmp_path), max_attempts=1) as (stage, client):

        async def lose() -> None:
            submit, _ = await submits(stage)
            stage.prefill[0].first_token(submit, IDS[0])
            await stage.decode[0].stop()
            stage.prefill[0].released(submit)

        headers = {"authorization": f"Bearer {USE}"}
        response = await post(client, COMPLETIONS, body_of(COMPLETIONS, stream=stream), lose(), headers=headers)
        assert "the last: decode_lost" in response.text
        assert not names_a_node(stage, response.text)
        assert "(" not in response.text.partition("decode_lost")[2].partition('"')[0], (
            "no hint with the node's own words"
        )
