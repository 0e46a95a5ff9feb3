"""What the HTTP front does to clients that leave, do not read, have no key, come from elsewhere, or send what nobody serves."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdserve.core.clock import SystemClock
from pdserve.core.errors import AddressInUse, Overloaded
from pdserve.core.router_settings import RouterSettings
from pdserve.core.settings import load_settings
from pdserve.router.http import app
from pdserve.router.http.body import parsed_object
from pdserve.router.http.errors import JsonObject
from pdserve.router.server import Router
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import IDS, ask, submits
from tests.router.http_calls import CHAT, COMPLETIONS, adopted, body_of, http_stage, play, post, text_of, tokens_of
from tests.router.models import write_model_folder
from tests.router.scripted_node import DEADLINE_S, Stage, leg, until

pytestmark = pytest.mark.asyncio
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
Http = tuple[Stage, httpx.AsyncClient]
KEY = "a-key-of-the-test"


@pytest_asyncio.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Http]:
    folder = tmp_path_factory.mktemp("http")
    given = {"max_message_bytes": 20_000, "api_key": f"other-key,{KEY}", "cors_origin": "https://app.example"}
    async with http_stage(folder, **given) as (stage, client):
        client.headers["authorization"] = f"Bearer {KEY}"
        yield stage, client


@pytest_asyncio.fixture
async def http(running: Http) -> AsyncIterator[Http]:
    yield running
    await running[0].leak_oracle()


async def released_by_cancel(stage: Stage) -> None:
    """Both nodes hear the cancel, and let go."""
    for node in (stage.prefill[0], stage.decode[0]):
        node.released(await node.next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)


@PATHS
@STREAMED
async def test_a_client_that_leaves_before_the_first_token_cancels_both_nodes(
    http: Http, path: str, stream: bool
) -> None:
    stage, client = http
    asking = asyncio.create_task(client.post(path, json=body_of(path, stream=stream)))
    await submits(stage)
    asking.cancel()
    await released_by_cancel(stage)


@PATHS
async def test_a_client_that_leaves_in_mid_stream_cancels_both_nodes(http: Http, path: str) -> None:
    stage, client = http

    async def first_token() -> None:
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])

    first = asyncio.create_task(first_token())
    async with client.stream("POST", path, json=body_of(path, stream=True)) as response:
        await first
        await anext(response.aiter_lines())
    await released_by_cancel(stage)


async def test_one_client_that_leaves_cancels_all_its_prompts(http: Http) -> None:
    stage, client = http
    asking = asyncio.create_task(client.post(COMPLETIONS, json=body_of(COMPLETIONS, prompt=["one", "two"])))
    await submits(stage)
    await submits(stage)
    asking.cancel()
    await released_by_cancel(stage)
    await released_by_cancel(stage)


async def test_a_prompt_that_is_refused_takes_the_others_along(http: Http) -> None:
    """All or nothing: the first prompt was already with the nodes."""
    stage, client = http
    body = body_of(COMPLETIONS, prompt=["one", "x" * 15_000])
    response = await post(client, COMPLETIONS, body, released_by_cancel(stage))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


@PATHS
async def test_a_failure_before_the_first_token_has_its_status(http: Http, path: str) -> None:
    stage, client = http

    async def refuse() -> None:
        submit, _ = await submits(stage)
        stage.decode[0].released(submit, node_pb2.LEG_OUTCOME_REFUSED)
        stage.prefill[0].released(await stage.prefill[0].next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)

    response = await post(client, path, body_of(path, stream=True), refuse())
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("together", [False, True], ids=["alone", "with tokens"])
@PATHS
async def test_a_failure_in_mid_stream_is_an_error_event_and_never_done(
    tmp_path: Path, path: str, together: bool
) -> None:
    async with http_stage(tmp_path, max_attempts=1) as (stage, client):

        async def fail() -> None:
            submit, _ = await submits(stage)
            stage.prefill[0].first_token(submit, IDS[0])
            await adopted(stage, submit)
            stage.prefill[0].released(submit)
            if together:
                tokens = tokens_of(submit, 0, IDS[1:3])
                tokens.finish_reason = inference_pb2.FINISH_REASON_UNSPECIFIED
                ended = node_pb2.LegEnded(outcome=node_pb2.LEG_OUTCOME_FAILED, reason="scripted")
                events = [leg(submit, ended=ended), leg(submit, released=node_pb2.LegReleased())]
                stage.decode[0].step(tokens=[tokens], events=events)
            else:
                stage.decode[0].released(submit, node_pb2.LEG_OUTCOME_FAILED)

        response = await post(client, path, body_of(path, stream=True), fail())
        *events, last, end = response.text.split("\n\n")
        assert (response.status_code, end) == (200, "")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "attempts_exhausted"
        assert "[DONE]" not in response.text
        sent = [json.loads(event.removeprefix("data: ")) for event in events]
        assert text_of(sent) == ("abc" if together else "a"), "what was made is shown"
        choices = [event["choices"][0] for event in sent]
        assert [choice["finish_reason"] for choice in choices] == [None] * len(choices)


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"authorization": KEY}],
    ids=["none", "wrong", "another scheme", "no scheme"],
)
async def test_without_a_key_nothing_is_served_but_probes(http: Http, headers: dict[str, str]) -> None:
    _, client = http
    async with httpx.AsyncClient(base_url=client.base_url) as stranger:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            response = await stranger.post(path, json={}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/metrics", "/load", "/debug/state"):
            assert (await stranger.get(path, headers=headers)).status_code == 401
        for path in ("/health", "/version"):
            assert (await stranger.get(path, headers=headers)).status_code == 200


async def test_every_key_opens(http: Http) -> None:
    _, client = http
    for key in ("other-key", KEY):
        response = await client.get("/v1/models", headers={"authorization": f"bearer {key}"})
        assert response.status_code == 200
    response = await client.get("/v1/models", headers={"authorization": f"Bearer other-key,{KEY}"})
    assert response.status_code == 401, "keys are separate"


async def test_pages_of_a_listed_origin_may_ask(http: Http) -> None:
    _, client = http
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    response = await client.options(CHAT, headers={"origin": "https://app.example", **asked})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    response = await client.options(CHAT, headers={"origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in response.headers
    response = await client.get("/v1/models", headers={"origin": "https://app.example", "authorization": ""})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://app.example", "a page must see why"


BODIES: dict[str, tuple[dict[str, Any], int, str]] = {
    "not JSON": ({"content": b"{"}, 400, "invalid_json"),
    "a form": ({"content": b"a=b", "headers": {"content-type": "application/x-www-form-urlencoded"}}, 415, ""),
    "too large": ({"content": b" " * 20_001}, 413, "request_too_large"),
    "too large in pieces": ({"content": None}, 413, "request_too_large"),
    "unknown model": ({"json": {"model": "gpt-9", "prompt": "x", "messages": None}}, 404, "model_not_found"),
}


@pytest.mark.parametrize(("sent", "status", "code"), BODIES.values(), ids=BODIES)
async def test_bodies_that_are_no_request(http: Http, sent: dict[str, Any], status: int, code: str) -> None:
    _, client = http

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    if sent.get("content", b"") is None:
        sent = {"content": pieces()}
    response = await client.post(COMPLETIONS, **sent)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["code"] in (code, "unsupported_media_type")
    assert response.headers["x-request-id"]


async def test_a_large_body_is_parsed_off_the_event_loop(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = http
    seen: list[str] = []

    def parsed(body: bytes) -> JsonObject:
        seen.append(threading.current_thread().name)
        return parsed_object(body)

    monkeypatch.setattr(app, "parsed_object", parsed)
    monkeypatch.setattr(app, "MAX_INLINE_BYTES", 1000)
    for text in ("abc", "abc" * 1000):
        response = await client.post("/tokenize", json={"prompt": text})
        assert response.json()["count"] == len(text)
        assert (await client.post(COMPLETIONS, json={"prompt": text, "n": "x"})).json()["error"]["param"] == "n"
    on_loop, off_loop = seen[:2], seen[2:]
    assert set(on_loop) == {threading.main_thread().name}
    assert all(name.startswith("tokenizer") for name in off_loop)


async def test_paths_and_methods_that_are_not_served(http: Http) -> None:
    _, client = http
    for response, status in (
        (await client.get("/v1/nothing"), 404),
        (await client.get(COMPLETIONS), 405),
        (await client.delete("/v1/models"), 405),
        (await client.get("/v1/models/other"), 404),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await client.get(COMPLETIONS)).headers["allow"] == "POST"


async def test_request_ids(http: Http) -> None:
    """One is made where none was given; one that cannot stand in a log is refused, and not sent back."""
    stage, client = http
    first, second = [(await client.get("/version")).headers["x-request-id"] for _ in range(2)]
    assert first != second
    response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS), headers={"x-request-id": "x" * 129})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Request-Id")
    assert "x-request-id" not in response.headers
    submit = asyncio.create_task(play(stage, IDS[:4]))
    await client.post(COMPLETIONS, json=body_of(COMPLETIONS), headers={"x-request-id": "of the client"})
    assert (await submit).request_label == "of the client"


async def test_models_and_version(http: Http) -> None:
    _, client = http
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("model", "model", 1000)
    assert (await client.get("/v1/models/model")).json() == model
    assert (await client.get("/version")).json()["version"]


async def test_tokenize_and_detokenize(http: Http) -> None:
    stage, client = http
    answer = (await client.post("/tokenize", json={"prompt": "héllo wörld the", "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1000
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "héllo wörld the"}
    chat = {"messages": [{"role": "user", "content": "the"}]}
    ids = (await client.post("/tokenize", json=chat)).json()["tokens"]
    submit = asyncio.create_task(play(stage, IDS[:4]))
    await client.post(CHAT, json=body_of(CHAT))
    assert list((await submit).prompt_ids) == ids, "the ids that an answer is made from"
    text = (await client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    assert text == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    for path, body, param in (
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        response = await client.post(path, json=body)
        assert response.json()["error"]["param"] == param


async def test_overload_says_when_to_come_back(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, client = http

    def refuse(*_: object) -> None:
        raise Overloaded("full", retry_after_s=1.5)

    with monkeypatch.context() as patch:
        patch.setattr(stage.router.admission, "admit", refuse)
        response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS))
    assert response.status_code == 429
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1500")


async def test_a_fault_of_ours_is_a_500_and_says_nothing_of_itself(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, client = http

    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(stage.router.admission, "admit", broken)
        response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS))
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


async def test_a_draining_router_says_so_and_finishes_what_it_began(tmp_path: Path) -> None:
    async with http_stage(tmp_path) as (stage, client):
        asking = asyncio.create_task(client.post(COMPLETIONS, json=body_of(COMPLETIONS)))
        submit, _ = await submits(stage)
        stage.stop.set()
        await until(lambda: stage.router.admission.is_draining)
        response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert response.headers["retry-after"] == "1"
        health = await client.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "draining")
        stage.prefill[0].first_token(submit, IDS[0])
        await adopted(stage, submit)
        stage.prefill[0].released(submit)
        stage.decode[0].tokens(submit, 1, IDS[1:4], is_last=True)
        stage.decode[0].released(submit)
        assert (await asking).json()["choices"][0]["text"] == "abcd"

        async def is_closed() -> bool:
            try:
                await client.get("/version")
            except httpx.TransportError:
                return True
            return False

        await until(is_closed)


async def test_health_follows_the_pools(tmp_path: Path) -> None:
    async with http_stage(tmp_path) as (stage, client):
        assert (await client.get("/health")).json() == {"status": "ready"}
        stage.decode[0].weight_digest = "other weights"
        stage.decode[0].hang_up()

        async def is_not_ready() -> bool:
            return (await client.get("/health")).status_code == 503

        await until(is_not_ready)
        response = await client.post(COMPLETIONS, json=body_of(COMPLETIONS))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_nodes")


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = load_settings(RouterSettings, {"port": 0, "http_port": port, "model": str(model)})
        stop = asyncio.Event()
        with pytest.raises(AddressInUse, match="--http-port") as refusal:
            await Router(settings, SystemClock()).run(stop, stop)
    assert str(port) in str(refusal.value)


async def test_http_can_be_off(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    router = Router(load_settings(RouterSettings, {"port": 0, "http_port": "off", "model": str(model)}), SystemClock())
    stop = asyncio.Event()
    stop.set()
    await asyncio.wait_for(router.run(stop, stop), DEADLINE_S)
    assert router.http is None


async def test_clients_of_both_fronts_are_counted(http: Http) -> None:
    stage, client = http
    asking = asyncio.create_task(client.post(COMPLETIONS, json=body_of(COMPLETIONS)))
    submit, _ = await submits(stage)
    call = ask(stage, key=KEY)
    other, _ = await submits(stage)
    metrics = (await client.get("/metrics")).text
    assert "pdserve_router_clients 2.0" in metrics
    for each in (submit, other):
        stage.prefill[0].first_token(each, IDS[0])
        await adopted(stage, each)
        stage.prefill[0].released(each)
        stage.decode[0].tokens(each, 1, IDS[1:4], is_last=True)
        stage.decode[0].released(each)
    await asking
    async for _ in call:
        pass
