"""Writes one answer: opens a session per prompt, takes what comes, and sends it whole or as server-sent events.

A client that leaves is noticed while anything is waited for; its sessions end at once on both nodes.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from pdserve.core.api_keys import Caller
from pdserve.core.errors import InternalError, PdserveError, SlowReader
from pdserve.router.answering import Answering, Reply
from pdserve.router.http.errors import HttpFault, JsonObject, answer_of
from pdserve.router.http.extension import extension, server_timing
from pdserve.router.http.fields import Asked, Wishes
from pdserve.router.http.shape import PromptView, Shape, usage_of
from pdserve.router.instructions import Answer, Fail, Finish
from pdserve.router.mailbox import Parcel
from pdserve.router.output import Shown

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of an answer begins with. `created` is Unix time, seconds."""

    id: str
    created: int
    model: str

    def of(self, kind: str) -> JsonObject:
        """Return the beginning of an object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class AnswerResponse:
    """The ASGI application that answers one request."""

    def __init__(
        self, answering: Answering, asked: Asked, caller: Caller, shape: Shape, head: Head, received_s: float
    ) -> None:
        self._answering, self._asked, self._caller, self._shape, self._head = answering, asked, caller, shape, head
        self._received_s = received_s
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves before that."""
        await until_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._answering.client():
                if self._asked.stream:
                    await self._stream(send)
                else:
                    await self._whole(scope, receive, send)
        except PdserveError as error:
            await self._fail(error, scope, receive, send)
        except Exception as error:  # noqa: BLE001 - told as an internal error, and logged by `fault_of`
            await self._fail(fault_of(error), scope, receive, send)

    # ---- whole

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            replies = await self._open(stack)
            whole = [(reply, await reply.take()) for reply in replies]
        num_entries = sum(parcel.num_entries for _, parcel in whole)
        response = await self._answering.put_into_words(num_entries, partial(self._body, whole))
        self._has_begun = True
        await self._answering.until_taken(response(scope, receive, send))

    def _body(self, whole: Sequence[tuple[Reply, Parcel]]) -> JSONResponse:
        answered = [(reply, parcel.end) for reply, parcel in whole if isinstance(parcel.end, Answer)]
        assert len(answered) == len(whole), "a whole answer ends well, or take() raises"
        choices: list[JsonObject] = []
        for reply, parcel in whole:
            choices += self._choices(reply, parcel, len(choices))
        body = self._head.of(self._shape.whole_object) | {
            "choices": choices,
            "usage": usage_of(answer for _, answer in answered),
            "pdserve": extension(answered),
        }
        return JSONResponse(body, headers={"server-timing": server_timing(answer for _, answer in answered)})

    def _choices(self, reply: Reply, parcel: Parcel, first: int) -> list[JsonObject]:
        shown = {gain.sequence: gain.shown for gain in parcel.gains}
        ends: dict[int, Finish] = {finish.sequence: finish for finish in parcel.finished}
        prompt = PromptView(reply.request, reply.prompt_ids, parcel.prompt)
        return [
            self._shape.whole(first + sequence, shown.get(sequence, Shown()), ends[sequence], prompt)
            for sequence in range(reply.request.n)
        ]

    # ---- streamed

    async def _stream(self, send: Send) -> None:
        async with AsyncExitStack() as stack:
            replies = await self._open(stack)
            events = EventStream(self._shape, self._head, replies, self._asked.wishes)
            async with aclosing(parcels_of(replies)) as parcels:
                async for number, parcel in parcels:
                    await self._send(send, events.of_parcel(number, parcel))
                    if isinstance(parcel.end, Fail):
                        raise parcel.end.error
            await self._send(send, [events.last(), DONE], is_last=True)

    async def _send(self, send: Send, events: Sequence[bytes], *, is_last: bool = False) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        if events or is_last:
            body = {"type": "http.response.body", "body": b"".join(events), "more_body": not is_last}
            await self._answering.until_taken(send(body))

    # ---- both

    async def _open(self, stack: AsyncExitStack) -> list[Reply]:
        return [
            await stack.enter_async_context(self._answering.session(call, self._caller, self._received_s))
            for call in self._asked.calls
        ]

    async def _fail(self, error: PdserveError, scope: Scope, receive: Receive, send: Send) -> None:
        """Say what went wrong: with its status, or, in a stream that has begun, as its last event, without `[DONE]`."""
        if not self._has_begun:
            told: Awaitable[None] = error_response(error, self._asked.names)(scope, receive, send)
        elif isinstance(error, SlowReader):
            return
        else:
            body = event(answer_of(error, self._asked.names).body)
            told = send({"type": "http.response.body", "body": body, "more_body": False})
        with contextlib.suppress(SlowReader):  # whoever reads nothing hears of no error either
            await self._answering.until_taken(told)


class EventStream:
    """From parcels to events. The last finish of all waits for what closes the answer, which it carries.

    Tokens without text yet (half a character, the beginning of a tool call) make no event, unless tokens were asked for.
    """

    def __init__(self, shape: Shape, head: Head, replies: Sequence[Reply], wishes: Wishes) -> None:
        self._shape, self._head, self._replies, self._wishes = shape, head, replies, wishes
        self._opened: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._num_open = sum(reply.request.n for reply in replies)
        self._held: JsonObject | None = None

    def of_parcel(self, number: int, parcel: Parcel) -> list[bytes]:
        """Return the events for what came for the prompt of that number."""
        request = self._replies[number].request
        first = sum(reply.request.n for reply in self._replies[:number])
        events = self._open(number, parcel, first)
        events += [
            self._chunk(self._shape.gained(first + gain.sequence, gain.shown))
            for gain in parcel.gains
            if self._wishes.sees(gain.shown)
        ]
        for finish in parcel.finished:
            choice = self._shape.ended(first + finish.sequence, finish, request)
            self._num_open -= 1
            if self._num_open:
                events.append(self._chunk(choice))
            else:
                self._held = choice
        if isinstance(parcel.end, Answer):
            self._answers[number] = parcel.end
        return events

    def last(self) -> bytes:
        """Return the events that close a complete answer."""
        assert self._held is not None, "every sequence has ended"
        answered = [(reply, self._answers[number]) for number, reply in enumerate(self._replies)]
        closing: JsonObject = {"pdserve": extension(answered)}
        if not self._wishes.include_usage:
            return self._chunk(self._held, closing)
        usage = self._head.of(self._shape.chunk_object) | {"choices": [], "usage": usage_of(self._answers.values())}
        return self._chunk(self._held) + event(usage | closing)

    def _open(self, number: int, parcel: Parcel, first: int) -> list[bytes]:
        if number in self._opened:
            return []
        self._opened.add(number)
        reply = self._replies[number]
        prompt = PromptView(reply.request, reply.prompt_ids, parcel.prompt)
        choices = [self._shape.opening(first + sequence, prompt) for sequence in range(reply.request.n)]
        return [self._chunk(choice) for choice in choices if choice is not None]

    def _chunk(self, choice: JsonObject, more: Mapping[str, object] | None = None) -> bytes:
        usage: JsonObject = {"usage": None} if self._wishes.include_usage else {}
        return event(self._head.of(self._shape.chunk_object) | {"choices": [choice]} | usage | dict(more or {}))


async def parcels_of(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, Parcel], None]:
    """Yield what comes, with the number of its prompt, until all have ended."""
    if len(replies) == 1:
        while True:
            parcel = await replies[0].take()
            yield 0, parcel
            if parcel.end is not None:
                return
    waits = {asyncio.create_task(reply.take()): number for number, reply in enumerate(replies)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waits.__getitem__):
                number = waits.pop(task)
                parcel = task.result()
                if parcel.end is None:
                    waits[asyncio.create_task(replies[number].take())] = number
                yield number, parcel
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def until_gone(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Do the work, which must not raise, until it is done or the client leaves."""
    async with asyncio.TaskGroup() as tasks:
        working, watching = tasks.create_task(work), tasks.create_task(_gone(receive))
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        watching.cancel()


def error_response(error: PdserveError | HttpFault, names: Mapping[str, str]) -> JSONResponse:
    """Return the answer for an error before which nothing was sent."""
    answer = answer_of(error, names)
    return JSONResponse(answer.body, status_code=answer.status, headers=dict(answer.headers))


def fault_of(error: Exception) -> InternalError:
    """Log a fault of ours, which is being handled, and return what the client is told of it."""
    logger.exception("a fault of the HTTP front; the request fails")
    return InternalError(f"a fault of the router: {type(error).__name__}", hint="see the router's log")


def event(content: JsonObject) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
