"""What an HTTP client does, and what the scripted nodes answer it."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from pdserve.v1 import inference_pb2, node_pb2
from tests.router.client_calls import submits
from tests.router.scripted_node import DEADLINE_S, Stage, leg, start_stage, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Json = dict[str, Any]


def body_of(path: str, **fields: Any) -> Json:
    """Return a body for either path that asks for four tokens."""
    prompt: Json = {"prompt": "the"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "the"}]}
    return {**prompt, "max_tokens": 4, **fields}


@asynccontextmanager
async def http_stage(folder: Path, **given: Any) -> AsyncIterator[tuple[Stage, httpx.AsyncClient]]:
    """A router between ready scripted nodes, and a client of its HTTP port; nothing may be left at the end."""
    async with front_stage(folder, None, given) as ends:
        yield ends


@asynccontextmanager
async def front_stage(
    folder: Path, verify: ssl.SSLContext | None, given: Mapping[str, Any]
) -> AsyncIterator[tuple[Stage, httpx.AsyncClient]]:
    """The same, with a client that speaks TLS by `verify`."""
    async with start_stage(folder, **{"http_port": "0", **given}) as stage:
        await stage.until("ready", 2)
        assert stage.router.http is not None
        address = f"{'https' if verify else 'http'}://127.0.0.1:{stage.router.http.port}"
        async with httpx.AsyncClient(base_url=address, timeout=DEADLINE_S, verify=verify or True) as client:
            yield stage, client
        await stage.leak_oracle()


async def play(stage: Stage, *sequences: Sequence[int]) -> node_pb2.Submit:
    """Answer the next request: one list of ids per sequence, each ended by its length."""
    submit, _ = await submits(stage)
    prefill, decode = stage.prefill[0], stage.decode[0]
    firsts = [
        node_pb2.FirstToken(
            index=0, sequence=number, token_id=ids[0], logprob=-0.5, top_logprobs=top_of(submit, ids[0], -0.5)
        )
        for number, ids in enumerate(sequences)
    ]
    if submit.prompt_logprobs:
        tops = [top_of(submit, token_id, -2.0) for token_id in submit.prompt_ids[1:]]
        scores = node_pb2.LegPromptLogprobs(start=1, logprobs=[-2.0] * len(tops), top_logprobs=tops)
        prefill.step(events=[leg(submit, prompt_logprobs=scores)])
    prefill.step(events=[leg(submit, first_token=node_pb2.LegFirstToken(tokens=firsts, num_cached_tokens=0))])
    await adopted(stage, submit)
    prefill.released(submit)
    for number, ids in enumerate(sequences):
        decode.step(tokens=[tokens_of(submit, number, ids[1:])])
    decode.released(submit)
    return submit


async def adopted(stage: Stage, submit: node_pb2.Submit) -> None:
    """Let the decode node adopt once the router has the first token: the two streams keep no order between them."""

    def is_heard() -> bool:
        rows = stage.router.sessions.rows(1000)
        return all(row.num_output_tokens for row in rows if row.session_id == submit.session_id)

    await until(is_heard)
    stage.decode[0].adopted(submit)


def tokens_of(submit: node_pb2.Submit, sequence: int, ids: Sequence[int]) -> node_pb2.SequenceTokens:
    """Return the tokens after the first, and the end by length."""
    return node_pb2.SequenceTokens(
        session_id=submit.session_id,
        attempt=submit.attempt,
        sequence=sequence,
        first_index=1,
        token_ids=ids,
        logprobs=[-0.25] * len(ids),
        top_logprobs=[top_of(submit, token_id, -0.25) for token_id in ids] if submit.top_logprobs else [],
        finish_reason=inference_pb2.FINISH_REASON_LENGTH,
    )


def top_of(submit: node_pb2.Submit, token_id: int, logprob: float) -> inference_pb2.TopLogprobs:
    """Return as many likely tokens as were asked for: an other one, the token itself, and more."""
    others = [(3, logprob + 0.125), (token_id, logprob), *((4 + i, -3.0 - i) for i in range(20))]
    top = others[: submit.top_logprobs]
    return inference_pb2.TopLogprobs(token_ids=[one for one, _ in top], logprobs=[its for _, its in top])


async def post(
    client: httpx.AsyncClient, path: str, body: Json, *playing: Coroutine[Any, Any, Any], **more: Any
) -> httpx.Response:
    """Send a request while the nodes play."""
    async with asyncio.TaskGroup() as tasks:
        for each in playing:
            tasks.create_task(each)
        return await client.post(path, json=body, **more)


def events_of(text: str) -> list[Json]:
    """Return the events of a complete stream; each is framed exactly as OpenAI's, and the last is [DONE]."""
    pieces = text.split("\n\n")
    assert pieces.pop() == ""
    assert pieces.pop() == "data: [DONE]"
    assert all(piece.startswith("data: {") and "\n" not in piece for piece in pieces)
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def text_of(events: Sequence[Json], index: int = 0) -> str:
    """Return what one choice said."""
    said = ""
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                said += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return said
