"""When a call is tried again, by the policy alone and by both clients against a router that refuses."""

import asyncio

import pytest

from pdserve.client import NO_RETRIES, AsyncClient, Client, Options, RetryPolicy
from pdserve.client.retries import Tries
from pdserve.core.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, Overloaded, Unreachable
from tests.client.stub_router import ANSWER, StubRouter, stub_router

FULL = Overloaded("queues are full", retry_after_s=2.0)
DEADLINE_S = 30.0
PATIENT = RetryPolicy(max_tries=9, max_total_s=1e6)


def test_pause_is_what_the_error_asks_for_and_grows_from_a_small_one() -> None:
    tries = Tries(RetryPolicy(max_tries=9, max_total_s=1e3, first_pause_s=0.5, jitter=0.5), 100.0, None)
    now = Overloaded("", retry_after_s=0.0)
    assert [tries.pause_s(now, 100.0, 0.0) for _ in range(3)] == [0.5, 1.0, 2.0]
    assert tries.pause_s(Overloaded("", retry_after_s=7.0), 100.0, 0.0) == 7.0
    assert tries.pause_s(Overloaded("", retry_after_s=20.0), 100.0, 0.5) == 25.0


def test_error_that_does_not_say_when_is_not_tried_again() -> None:
    for error in (Overloaded("full"), InvalidRequest("no"), Unreachable("a stranger")):
        assert Tries(PATIENT, 0.0, None).pause_s(error, 0.0, 0.0) is None


def test_number_of_tries_is_bounded() -> None:
    tries = Tries(RetryPolicy(max_tries=3, max_total_s=1e3), 0.0, None)
    assert [tries.pause_s(FULL, 0.0, 0.0) is None for _ in range(3)] == [False, False, True]
    assert Tries(NO_RETRIES, 0.0, None).pause_s(FULL, 0.0, 0.0) is None


@pytest.mark.parametrize("timeout_s", [None, 8.0, 99.0])
def test_time_is_bounded_by_the_policy_and_by_the_calls_own_deadline(timeout_s: float | None) -> None:
    tries = Tries(RetryPolicy(max_tries=9, max_total_s=10.0), 100.0, timeout_s)
    last_s = 100.0 + min(10.0, timeout_s or 10.0) - 2.0
    assert tries.pause_s(FULL, last_s - 0.01, 0.0) == 2.0
    assert tries.pause_s(FULL, last_s, 0.0) is None


def test_deadline_of_a_later_try_is_what_is_left() -> None:
    tries = Tries(PATIENT, 100.0, 5.0)
    assert [tries.remaining_s(now_s) for now_s in (100.0, 103.0, 106.0)] == [5.0, 2.0, 0.0]
    assert Tries(PATIENT, 100.0, None).remaining_s(103.0) is None


class Naps:
    """Sleeps that pass at once and are remembered."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.taken_s.append(pause_s)

    async def sleep_async(self, pause_s: float) -> None:
        self.taken_s.append(pause_s)


async def complete(kind: str, address: str, naps: Naps, options: Options | None = None) -> str:
    """Ask with the client of that kind; return the text."""
    policy = RetryPolicy(max_tries=3, jitter=0.5)
    if kind == "async":
        async with AsyncClient(address, retry=policy, sleep=naps.sleep_async, chance=lambda: 0.5) as client:
            return (await client.complete("hi", options)).text

    def ask() -> str:
        with Client(address, retry=policy, sleep=naps.sleep, chance=lambda: 0.5) as client:
            return client.complete("hi", options).text

    return await asyncio.to_thread(ask)


def refuse(router: StubRouter, number: int) -> None:
    router.refusals.extend([FULL] * number)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_refused_request_is_sent_again_when_the_router_says(kind: str) -> None:
    async with stub_router() as (router, address):
        naps = Naps()
        refuse(router, 2)
        assert await complete(kind, address, naps, Options(timeout_s=25.0)) == "Zwölf Bären"
        assert naps.taken_s == [2.5, 2.5]
        assert len(router.requests) == 3
        assert router.requests[0] == router.requests[2]
        assert all(deadline_s is not None and deadline_s < 30.0 for deadline_s in router.deadlines_s)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_last_refusal_is_the_answer(kind: str) -> None:
    async with stub_router() as (router, address):
        naps = Naps()
        refuse(router, 9)
        with pytest.raises(Overloaded, match="queues are full"):
            await complete(kind, address, naps)
        assert (len(router.requests), len(naps.taken_s)) == (3, 2)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_answer_that_has_begun_is_never_asked_for_again(kind: str) -> None:
    async with stub_router() as (router, address):
        naps = Naps()
        router.answer, router.error = ANSWER[:1], Draining("going", retry_after_s=1.0)
        with pytest.raises(Draining):
            await complete(kind, address, naps)
        assert (len(router.requests), naps.taken_s) == (1, [])


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_router_that_is_not_there_is_dialled_again_a_bounded_number_of_times(kind: str) -> None:
    naps = Naps()
    with pytest.raises(Unreachable, match="connection refused"):
        await complete(kind, "127.0.0.1:1", naps)
    assert len(naps.taken_s) == 2


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_cancel_ends_a_pause_between_tries(kind: str) -> None:
    loop, pausing = asyncio.get_running_loop(), asyncio.Event()

    def chance() -> float:
        """Asked for just before a pause."""
        loop.call_soon_threadsafe(pausing.set)
        return 0.0

    async with stub_router() as (router, address), asyncio.timeout(DEADLINE_S):
        router.refusals.append(Overloaded("full", retry_after_s=3600.0))
        with Client(address, retry=PATIENT, chance=chance) as plain:
            async with AsyncClient(address, retry=PATIENT, chance=chance) as client:
                if kind == "async":
                    stream = client.generate("hi")
                    asking, cancel = asyncio.create_task(stream.whole()), stream.cancel
                else:
                    answer = plain.generate("hi")
                    asking, cancel = asyncio.create_task(asyncio.to_thread(answer.whole)), answer.cancel
                await pausing.wait()
                cancel()
                with pytest.raises(Cancelled):
                    await asking
        assert len(router.requests) == 1


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.asyncio
async def test_deadline_ends_an_answer_that_hangs(kind: str) -> None:
    async with stub_router() as (router, address):
        router.answer, router.hangs = ANSWER[:1], True
        with pytest.raises(DeadlineExceeded, match="before the answer was complete"):
            await complete(kind, address, Naps(), Options(timeout_s=0.2))
