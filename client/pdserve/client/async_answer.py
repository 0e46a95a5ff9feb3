"""An answer under way, for asyncio."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import grpc

from pdserve.client.answer import Answer, Part
from pdserve.client.failures import error_of, no_summary
from pdserve.client.pb import parts_from_pb
from pdserve.client.retries import Tries
from pdserve.core.errors import Cancelled, PdserveError
from pdserve.v1 import inference_pb2 as pb


class Responses(Protocol):
    """A running call of asyncio's stub."""

    def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        """Yield the messages."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


@dataclass(slots=True)
class AsyncCourse:
    """What an answer and its loop share. Neither of them holds the other: leaving an iteration ends the call at once."""

    start: Callable[[float | None], Responses]
    address: str
    tries: Tries
    chance: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] | None = None
    speaks_tls: bool = False
    answer: Answer = field(default_factory=Answer)
    has_begun: bool = False
    call: Responses | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def cancel(self) -> None:
        """End the call, or the pause before it, as cancelled."""
        self.cancelled.set()
        if self.call is not None:
            self.call.cancel()

    async def pause(self, pause_s: float) -> None:
        """Wait before the next try; a cancel ends the wait."""
        if self.sleep is not None:
            await self.sleep(pause_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.cancelled.wait()


class AsyncAnswerStream:
    """The parts of an answer as they arrive; the summary is the last one. Made by `AsyncClient.generate`.

    `answer` holds what came so far. Leaving the iteration (`aclose`, the end of an `async with`, or letting go of the stream)
    cancels the call on the router and on both nodes. `cancel` does so from elsewhere: the iteration then raises Cancelled.
    """

    def __init__(self, course: AsyncCourse) -> None:
        self._course = course
        self._parts = parts_of(course)

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        return self._course.answer

    def cancel(self) -> None:
        """Cancel the call; whoever iterates gets Cancelled."""
        self._course.cancel()

    def __aiter__(self) -> AsyncIterator[Part]:
        return self._parts

    async def __anext__(self) -> Part:
        return await anext(self._parts)

    async def aclose(self) -> None:
        """Leave the answer; the call is cancelled unless it is over."""
        await self._parts.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def whole(self) -> Answer:
        """Take all parts that are left, and return the answer."""
        async for _ in self:
            pass
        return self.answer


async def parts_of(course: AsyncCourse) -> AsyncGenerator[Part, None]:
    """Yield the parts of a call and of its further tries."""
    while True:
        if course.cancelled.is_set():
            raise was_cancelled()
        call = course.call = course.start(course.tries.remaining_s(time.monotonic()))
        try:
            async for message in call:
                arrival_s = course.tries.elapsed_s(time.monotonic())
                for part in parts_from_pb(message, arrival_s):
                    course.has_begun = True
                    course.answer.add(part)
                    yield part
            if course.answer.summary is None:
                raise no_summary()
        except grpc.aio.AioRpcError as error:
            failed: PdserveError = error_of(
                course.address, error, has_begun=course.has_begun, speaks_tls=course.speaks_tls
            )
        except asyncio.CancelledError:
            # gRPC raises it too for a call that was cancelled, here or by closing the client: the task itself was not.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise was_cancelled() from None
        else:
            return
        finally:
            call.cancel()
        if course.cancelled.is_set():
            raise was_cancelled() from None
        pause_s = None if course.has_begun else course.tries.pause_s(failed, time.monotonic(), course.chance())
        if pause_s is None:
            raise failed from None
        await course.pause(pause_s)


def was_cancelled() -> Cancelled:
    """Return the error of an answer that was cancelled here."""
    return Cancelled("the answer was cancelled by its own client")
