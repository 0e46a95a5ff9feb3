"""Many prompts at once, bounded: a fixed number of workers take prompts from one line."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator

from pdserve.client.answer import Answer
from pdserve.client.answer_stream import AnswerStream
from pdserve.client.request import Prompt
from pdserve.core.errors import InvalidRequest

MAX_CONCURRENCY = 8


async def complete_many_async(
    complete: Callable[[Prompt], Awaitable[Answer]], prompts: Iterable[Prompt], concurrency: int
) -> list[Answer]:
    """Return the answers in the order of the prompts. The first failure cancels the others and is raised."""
    line = enumerate(prompts)
    answers: dict[int, Answer] = {}

    async def work() -> None:
        for index, prompt in line:
            answers[index] = await complete(prompt)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(checked(concurrency)):
                workers.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [answers[index] for index in sorted(answers)]


def complete_many(
    generate: Callable[[Prompt], AnswerStream], prompts: Iterable[Prompt], concurrency: int
) -> list[Answer]:
    """Return the answers in the order of the prompts, with a thread per worker. The first failure, or an interrupt of the calling
    thread, cancels the others and is raised.
    """
    pool = Pool(generate, enumerate(prompts))
    threads = [threading.Thread(target=pool.work, daemon=True) for _ in range(checked(concurrency))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        pool.stop()
        for thread in threads:
            thread.join()
    if pool.failure is not None:
        raise pool.failure
    return [pool.answers[index] for index in sorted(pool.answers)]


class Pool:
    """What the workers of one call of `complete_many` share, under one lock."""

    def __init__(self, generate: Callable[[Prompt], AnswerStream], line: Iterator[tuple[int, Prompt]]) -> None:
        self._generate, self._line = generate, line
        self._lock = threading.Lock()
        self._under_way: set[AnswerStream] = set()
        self._is_stopped = False
        self.answers: dict[int, Answer] = {}
        self.failure: BaseException | None = None

    def work(self) -> None:
        """Take prompts until there are none, or until the pool is stopped."""
        try:
            while (taken := self._take()) is not None:
                index, stream = taken
                try:
                    self.answers[index] = stream.whole()
                finally:
                    with self._lock:
                        self._under_way.discard(stream)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits, whatever it is
            with self._lock:
                self.failure = self.failure or (None if self._is_stopped else error)
            self.stop()

    def stop(self) -> None:
        """Take no more, and cancel what is under way."""
        with self._lock:
            self._is_stopped = True
            left = tuple(self._under_way)
        for stream in left:
            stream.cancel()

    def _take(self) -> tuple[int, AnswerStream] | None:
        with self._lock:
            if self._is_stopped:
                return None
            taken = next(self._line, None)
            if taken is None:
                return None
            stream = self._generate(taken[1])
            self._under_way.add(stream)
            return taken[0], stream


def checked(concurrency: int) -> int:
    """Return `concurrency`. Raises InvalidRequest if nothing could run."""
    if concurrency < 1:
        raise InvalidRequest(f"concurrency is {concurrency}", hint="at least 1", field="concurrency")
    return concurrency
