"""Answers of the HTTP front, whole and streamed, over a real port; the nodes say what the test wants."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
import pytest_asyncio
from starlette.types import Message

from pdserve.core.api_keys import ANYONE
from pdserve.core.errors import NoNodes
from pdserve.router import answering
from pdserve.router.answering import Answering
from pdserve.router.http.answer import AnswerResponse, Head
from pdserve.router.http.chat_shape import ChatShape
from pdserve.router.http.fields import Asked, Wishes
from pdserve.router.http.shape import TokenFormat
from pdserve.router.http.token_texts import TokenTexts
from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import IDS, submits
from tests.router.http_calls import (
    CHAT,
    COMPLETIONS,
    Json,
    adopted,
    body_of,
    events_of,
    http_stage,
    play,
    post,
    text_of,
    tokens_of,
)
from tests.router.models import byte_level_tokenizer, vocabulary_of
from tests.router.scripted_node import DEADLINE_S, Stage, leg

pytestmark = pytest.mark.asyncio
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
Http = tuple[Stage, httpx.AsyncClient]


@pytest_asyncio.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Http]:
    async with http_stage(tmp_path_factory.mktemp("http")) as both:
        yield both


@pytest_asyncio.fixture
async def http(running: Http) -> AsyncIterator[Http]:
    yield running
    await running[0].leak_oracle()


@PATHS
async def test_a_whole_answer(http: Http, path: str) -> None:
    stage, client = http
    response = await post(client, path, body_of(path), play(stage, IDS[:4]), headers={"x-request-id": "mine"})
    assert response.status_code == 200
    whole = response.json()
    (choice,) = whole["choices"]
    said = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert (said, choice["finish_reason"], choice["index"]) == ("abcd", "length", 0)
    num_prompt = len(byte_level_tokenizer().encode("the").ids) if path == COMPLETIONS else 21
    assert whole["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "total_tokens": num_prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert whole["id"].endswith("-mine")
    assert response.headers["x-request-id"] == "mine"
    assert (whole["object"], whole["model"]) == (
        "text_completion" if path == COMPLETIONS else "chat.completion",
        "model",
    )


async def test_a_large_answer_is_the_same(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put into words on a thread, not on the event loop."""
    stage, client = http
    body = body_of(COMPLETIONS, logprobs=2, temperature=0)
    small = await post(client, COMPLETIONS, body, play(stage, IDS[:4]))
    monkeypatch.setattr(answering, "MAX_INLINE_ENTRIES", 11)
    large = await post(client, COMPLETIONS, body, play(stage, IDS[:4]))
    assert large.json()["choices"] == small.json()["choices"]


@PATHS
async def test_the_timeline_travels_in_the_body_and_in_a_header(http: Http, path: str) -> None:
    stage, client = http
    response = await post(client, path, body_of(path, seed=7), play(stage, IDS[:4]))
    extension = response.json()["pdserve"]
    assert extension["seed"] == 7
    timeline = extension["timeline"]
    assert sum(one["duration_s"] for one in timeline["stages"]) == pytest.approx(timeline["e2el_s"])
    assert [process["role"] for process in extension["processes"]] == ["router", "prefill", "decode"]
    parts = response.headers["server-timing"].split(", ")
    assert all(re.fullmatch(r"[\w-]+;dur=\d+\.\d{3}", part) for part in parts)
    durations = dict(part.split(";dur=") for part in parts)
    assert {"total", "ttft", "admission", "prefill", "decode"} <= durations.keys()
    assert float(durations["total"]) == pytest.approx(timeline["e2el_s"] * 1e3, abs=1e-3)


@PATHS
@pytest.mark.parametrize("usage", [False, True], ids=["plain", "with usage"])
async def test_a_stream(http: Http, path: str, usage: bool) -> None:
    stage, client = http
    body = body_of(path, stream=True, **({"stream_options": {"include_usage": True}} if usage else {}))
    response = await post(client, path, body, play(stage, IDS[:4]))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    assert text_of(events) == "abcd"
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    with_choice = events[:-1] if usage else events
    assert all(len(event["choices"]) == 1 for event in with_choice), "clients read choices[0] of every chunk"
    ends = [event["choices"][0]["finish_reason"] for event in with_choice]
    assert ends == [None] * (len(ends) - 1) + ["length"]
    assert events[-1]["pdserve"]["timeline"]["attempts"] == 1
    assert all("pdserve" not in event for event in events[:-1])
    if usage:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 4
        assert all(event["usage"] is None for event in with_choice)
    else:
        assert all("usage" not in event for event in events)
    if path == CHAT:
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert with_choice[-1]["choices"][0]["delta"] == {}


@pytest.mark.parametrize("wishes", [{}, {"return_token_ids": True}], ids=["text", "with ids"])
async def test_a_token_without_text_makes_an_event_only_if_tokens_are_asked_for(http: Http, wishes: Json) -> None:
    """Half a character, or the beginning of a call: clients were sent empty content."""
    stage, client = http
    half, other = byte_level_tokenizer().encode("😀").ids

    async def first_token() -> node_pb2.Submit:
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, half)
        return submit

    first = asyncio.create_task(first_token())
    async with client.stream("POST", CHAT, json=body_of(CHAT, stream=True, max_tokens=2, **wishes)) as response:
        submit = await first
        lines = response.aiter_lines()
        opening = await anext(lines)
        await adopted(stage, submit)
        stage.prefill[0].released(submit)
        stage.decode[0].step(tokens=[tokens_of(submit, 0, [other])])
        stage.decode[0].released(submit)
        rest = [line async for line in lines]
    events = events_of("\n".join([opening, *rest, ""]))
    contents = [event["choices"][0]["delta"].get("content") for event in events]
    assert contents == (["", "", "😀", None] if wishes else ["", "😀", None])


@PATHS
async def test_the_first_token_does_not_wait_for_the_transfer(http: Http, path: str) -> None:
    stage, client = http

    async def first_token() -> node_pb2.Submit:
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        return submit

    first = asyncio.create_task(first_token())
    async with client.stream("POST", path, json=body_of(path, stream=True)) as response:
        submit = await first
        lines = response.aiter_lines()
        said = ""
        while said != "a":
            line = await anext(lines)
            said += text_of([json.loads(line.removeprefix("data: "))]) if line else ""
        await adopted(stage, submit)
        stage.prefill[0].released(submit)
        stage.decode[0].step(tokens=[tokens_of(submit, 0, IDS[1:4])])
        stage.decode[0].released(submit)
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


@PATHS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_several_sequences(http: Http, path: str, stream: bool) -> None:
    stage, client = http
    body = body_of(path, n=2, stream=stream)
    response = await post(client, path, body, play(stage, IDS[:4], IDS[4:8]))
    if stream:
        events = events_of(response.text)
        assert [text_of(events, 0), text_of(events, 1)] == ["abcd", "efgh"]
        ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
        assert sorted(ends) == [0, 1]
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        said = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in choices]
        assert said == ["abcd", "efgh"]
        assert response.json()["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_several_prompts(http: Http, stream: bool) -> None:
    """Choices are numbered over all prompts, n for each; usage is the sum."""
    stage, client = http
    answers = {"one": (IDS[:2], IDS[2:4]), "two": (IDS[4:6], IDS[6:8])}
    body = body_of(COMPLETIONS, prompt=list(answers), n=2, max_tokens=2, stream=stream)

    async def answer_each() -> None:
        for _ in answers:
            submit, same = await submits(stage)
            assert submit == same
            text = byte_level_tokenizer().decode(list(submit.prompt_ids))
            firsts = [
                node_pb2.FirstToken(sequence=number, token_id=ids[0], logprob=-0.5)
                for number, ids in enumerate(answers[text])
            ]
            stage.prefill[0].step(events=[leg(submit, first_token=node_pb2.LegFirstToken(tokens=firsts))])
            await adopted(stage, submit)
            stage.prefill[0].released(submit)
            stage.decode[0].step(tokens=[tokens_of(submit, i, ids[1:]) for i, ids in enumerate(answers[text])])
            stage.decode[0].released(submit)

    response = await post(client, COMPLETIONS, body, answer_each())
    if stream:
        events = events_of(response.text)
        assert [text_of(events, index) for index in range(4)] == ["ab", "cd", "ef", "gh"]
        prompts = events[-1]["pdserve"]["prompts"]
    else:
        whole = response.json()
        assert [choice["text"] for choice in whole["choices"]] == ["ab", "cd", "ef", "gh"]
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert whole["usage"]["completion_tokens"] == 8
        prompts = whole["pdserve"]["prompts"]
    assert [prompt["request_id"][-2:] for prompt in prompts] == ["-0", "-1"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_echo_with_logprobs(http: Http, stream: bool) -> None:
    stage, client = http
    body = body_of(COMPLETIONS, prompt="abc", echo=True, logprobs=2, stream=stream)
    response = await post(client, COMPLETIONS, body, play(stage, IDS[3:7]))
    choices = [event["choices"][0] for event in events_of(response.text)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "abcdefg"
    merged: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            merged.setdefault(name, []).extend(values)
    assert merged["tokens"] == list("abcdefg")
    assert merged["token_logprobs"] == [None, -2.0, -2.0, -0.5, -0.25, -0.25, -0.25]
    assert merged["text_offset"] == list(range(7))
    assert merged["top_logprobs"][0] is None
    assert merged["top_logprobs"][4]["e"] == -0.25
    assert all(len(top) == 2 for top in merged["top_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_chat_logprobs(http: Http, stream: bool) -> None:
    stage, client = http
    ids = [*byte_level_tokenizer().encode("é").ids, IDS[0], IDS[1], IDS[2]]
    body = body_of(CHAT, logprobs=True, top_logprobs=2, stream=stream)
    response = await post(client, CHAT, body, play(stage, ids))
    choices = [event["choices"][0] for event in events_of(response.text)] if stream else response.json()["choices"]
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in entries] == ["é", "a", "b", "c"]
    assert [bytes(entry["bytes"]).decode() for entry in entries] == ["é", "a", "b", "c"]
    assert [entry["logprob"] for entry in entries] == [-0.5, -0.25, -0.25, -0.25]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4
    assert entries[1]["top_logprobs"][1] == {"token": "a", "logprob": -0.25, "bytes": [97]}


async def test_prompt_logprobs_and_token_ids(http: Http) -> None:
    stage, client = http
    body = body_of(COMPLETIONS, prompt=IDS[:3], prompt_logprobs=0, return_token_ids=True)
    response = await post(client, COMPLETIONS, body, play(stage, IDS[3:7]))
    (choice,) = response.json()["choices"]
    assert choice["prompt_token_ids"] == IDS[:3]
    assert choice["token_ids"] == IDS[3:7]
    first, second, _ = choice["prompt_logprobs"]
    assert first is None
    assert second == {str(IDS[1]): {"logprob": -2.0, "rank": None, "decoded_token": "b"}}
    assert choice["logprobs"] is None


@PATHS
async def test_tokens_can_be_named_by_id(http: Http, path: str) -> None:
    stage, client = http
    asked: dict[str, Any] = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True}
    body = body_of(path, return_tokens_as_token_ids=True, **asked)
    response = await post(client, path, body, play(stage, IDS[:4]))
    scores = response.json()["choices"][0]["logprobs"]
    names = scores["tokens"] if path == COMPLETIONS else [entry["token"] for entry in scores["content"]]
    assert names == [f"token_id:{token_id}" for token_id in IDS[:4]]


@PATHS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "ids", "reason", "stop"),
    [
        ({"stop": "cd"}, IDS[:4], "stop", "cd"),
        ({"stop_token_ids": [IDS[0]]}, None, "stop", IDS[0]),
        ({}, [2], "stop", None),
    ],
    ids=["text", "id", "end of sequence"],
)
async def test_why_an_answer_ended(
    http: Http, path: str, stream: bool, fields: dict[str, Any], ids: list[int] | None, reason: str, stop: object
) -> None:
    stage, client = http
    first = (ids or [IDS[0]])[0]

    async def play_end() -> None:
        submit, _ = await submits(stage)
        if stop == "cd":
            stage.prefill[0].first_token(submit, first)
            await adopted(stage, submit)
            stage.prefill[0].released(submit)
            stage.decode[0].tokens(submit, 1, IDS[1:4])
            stage.decode[0].released(await stage.decode[0].next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)
            return
        token = node_pb2.FirstToken(token_id=first, logprob=-0.5, finish_reason=inference_pb2.FINISH_REASON_STOP)
        stage.prefill[0].step(events=[leg(submit, first_token=node_pb2.LegFirstToken(tokens=[token]))])
        stage.prefill[0].released(submit)
        stage.decode[0].released(submit)

    response = await post(client, path, body_of(path, stream=stream, **fields), play_end())
    choice = events_of(response.text)[-1]["choices"][0] if stream else response.json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)


async def test_a_stop_text_is_not_shown(http: Http) -> None:
    stage, client = http

    async def play_end() -> None:
        submit, _ = await submits(stage)
        stage.prefill[0].first_token(submit, IDS[0])
        await adopted(stage, submit)
        stage.prefill[0].released(submit)
        stage.decode[0].tokens(submit, 1, IDS[1:4])
        stage.decode[0].released(await stage.decode[0].next_of("cancel"), node_pb2.LEG_OUTCOME_CANCELLED)

    response = await post(client, COMPLETIONS, body_of(COMPLETIONS, stop=["cd"]), play_end())
    assert response.json()["choices"][0]["text"] == "ab"


class Hasty:
    """Of an `Answering`, the wait for clients, which gives up at once."""

    unread_s = 0.0
    until_taken = Answering.until_taken


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "in mid-stream"])
async def test_a_client_that_takes_no_error_either_is_no_fault(has_begun: bool) -> None:
    """The second wait for it raised out of the application, with a traceback in the log."""
    asked = Asked((), Wishes(), stream=True, label="l")
    shape = ChatShape(TokenFormat(TokenTexts(vocabulary_of(byte_level_tokenizer())), asked.wishes))
    response = AnswerResponse(cast("Answering", Hasty()), asked, ANYONE, shape, Head("id", 0, "m"), 0.0)
    response._has_begun = has_begun

    async def never() -> Message:
        await asyncio.Event().wait()
        return {}

    async def send(message: Message) -> None:
        await never()

    scope = {"type": "http", "method": "POST", "headers": []}
    await asyncio.wait_for(response._fail(NoNodes("none"), scope, never, send), DEADLINE_S)
