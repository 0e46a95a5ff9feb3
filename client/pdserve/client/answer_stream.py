"""An answer under way, for threads."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import grpc

from pdserve.client.answer import Answer, Part
from pdserve.client.async_answer import was_cancelled
from pdserve.client.failures import error_of, no_summary
from pdserve.client.pb import parts_from_pb
from pdserve.client.retries import Tries
from pdserve.core.errors import PdserveError
from pdserve.v1 import inference_pb2 as pb


class Responses(Protocol):
    """A running call of a plain stub."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]:
        """Yield the messages."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


@dataclass(slots=True)
class Course:
    """What an answer and its loop share. Neither of them holds the other: leaving an iteration ends the call at once."""

    start: Callable[[float | None], Responses]
    address: str
    tries: Tries
    chance: Callable[[], float]
    sleep: Callable[[float], object] | None = None
    speaks_tls: bool = False
    answer: Answer = field(default_factory=Answer)
    has_begun: bool = False
    call: Responses | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """End the call, or the pause before it, as cancelled."""
        self.cancelled.set()
        call = self.call
        if call is not None:
            call.cancel()


class AnswerStream:
    """The parts of an answer as they arrive; the summary is the last one. Made by `Client.generate`.

    `answer` holds what came so far. Leaving the iteration (`close`, the end of a `with`, or letting go of the stream) cancels the
    call on the router and on both nodes. One thread iterates; any may `cancel`, and the one that iterates then gets Cancelled.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        self._parts = parts_of(course)

    @property
    def answer(self) -> Answer:
        """The answer so far."""
        return self._course.answer

    def cancel(self) -> None:
        """Cancel the call; whoever iterates gets Cancelled."""
        self._course.cancel()

    def __iter__(self) -> Iterator[Part]:
        return self._parts

    def __next__(self) -> Part:
        return next(self._parts)

    def close(self) -> None:
        """Leave the answer; the call is cancelled unless it is over. For the thread that iterates."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def whole(self) -> Answer:
        """Take all parts that are left, and return the answer."""
        for _ in self:
            pass
        return self.answer


def parts_of(course: Course) -> Generator[Part, None, None]:
    """Yield the parts of a call and of its further tries."""
    while True:
        if course.cancelled.is_set():
            raise was_cancelled()
        call = course.call = course.start(course.tries.remaining_s(time.monotonic()))
        try:
            if course.cancelled.is_set():  # between the look above and the call, by another thread
                call.cancel()
            for message in call:
                arrival_s = course.tries.elapsed_s(time.monotonic())
                for part in parts_from_pb(message, arrival_s):
                    course.has_begun = True
                    course.answer.add(part)
                    yield part
            if course.answer.summary is None:
                raise no_summary()
        except grpc.RpcError as error:
            failed: PdserveError = error_of(
                course.address, error, has_begun=course.has_begun, speaks_tls=course.speaks_tls
            )
        else:
            return
        finally:
            call.cancel()
        if course.cancelled.is_set():
            raise was_cancelled() from None
        pause_s = None if course.has_begun else course.tries.pause_s(failed, time.monotonic(), course.chance())
        if pause_s is None:
            raise failed from None
        if course.sleep is not None:
            course.sleep(pause_s)
        else:
            course.cancelled.wait(pause_s)
