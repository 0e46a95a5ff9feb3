"""Strangers at the ports of real processes, while honest requests go on: memory and descriptors flat, every answer exact.

Failure class 34. What is said to each stranger on one connection stands in `tests/kvtransfer/test_doors.py`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from pdserve.client import Options
from pdserve.kvtransfer.strangers import MAX_STRANGERS
from tests.e2e.cluster import Cluster, start_cluster, until
from tests.e2e.tiny_model import decided_prompts, expected_tokens
from tests.kvtransfer.hostile import ATTACKS, MIB, Peer, greeting

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NUM_TOKENS = 12
OVER_TCP = ("--kv-shared-memory", "off")
FEW_MIB = 32
"""One endless message of those below would come to 256."""
FLOOD = 8 * MAX_STRANGERS


@pytest_asyncio.fixture(scope="module")
async def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("strangers")
    async with start_cluster(tiny, folder, prefill=(OVER_TCP,), decode=(OVER_TCP,)) as running:
        yield running


@pytest_asyncio.fixture(autouse=True)
async def oracle(cluster: Cluster) -> AsyncIterator[None]:
    yield
    await cluster.leak_oracle()


class Honest:
    """Requests one after the other, each exact and in one attempt, and what the decode node needs meanwhile."""

    def __init__(self, cluster: Cluster, tiny: Path) -> None:
        self._cluster, self._tiny = cluster, tiny
        self._prompts = decided_prompts(tiny, 6, 64, NUM_TOKENS)
        self._decode = psutil.Process(cluster.nodes["decode0"].popen.pid)
        self.num_answers = 0

    @property
    def resident_mib(self) -> float:
        return float(self._decode.memory_info().rss) / MIB

    @property
    def num_descriptors(self) -> int:
        return int(self._decode.num_fds())

    async def ask(self) -> None:
        prompt = self._prompts[self.num_answers % len(self._prompts)]
        answer = await self._cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
        assert answer.token_ids == expected_tokens(self._tiny, prompt, NUM_TOKENS)[0]
        assert answer.summary is not None
        assert answer.summary.timeline.attempts == 1, "a stranger cost an attempt"
        self.num_answers += 1

    async def ask_while(self, attack: Awaitable[object]) -> None:
        """Ask until the attack is over, three times at least."""
        running = asyncio.ensure_future(attack)
        before = self.num_answers
        while not running.done() or self.num_answers - before < 3:
            await self.ask()
        await running


async def kv_address(cluster: Cluster) -> str:
    state = await cluster.state()
    return next(node.kv_addresses[0] for node in state.nodes if node.kv_addresses)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_stranger_at_the_kv_port_costs_nothing(cluster: Cluster, tiny: Path, attack: str) -> None:
    honest, address = Honest(cluster, tiny), await kv_address(cluster)
    for _ in range(3):
        await honest.ask()
    resident_mib, descriptors = honest.resident_mib, honest.num_descriptors

    def strike() -> None:
        for _ in range(4):
            with Peer(address) as stranger:
                ATTACKS[attack](stranger)
                assert stranger.is_hung_up_on()

    await honest.ask_while(asyncio.to_thread(strike))
    assert cluster.nodes["decode0"].is_alive
    assert honest.resident_mib - resident_mib < FEW_MIB
    await until(lambda: _is_at_most(honest, descriptors), "every descriptor is given back")


async def test_a_flood_of_connections_is_kept_small(cluster: Cluster, tiny: Path) -> None:
    honest, address = Honest(cluster, tiny), await kv_address(cluster)
    for _ in range(3):
        await honest.ask()
    resident_mib, descriptors = honest.resident_mib, honest.num_descriptors

    def flood(stack: contextlib.ExitStack) -> None:
        for number in range(FLOOD):
            stranger = stack.enter_context(Peer(address))
            if number % 2:
                stranger.say(greeting(b"PLAIN") + bytes(number % 7))

    with contextlib.ExitStack() as stack:
        await honest.ask_while(asyncio.to_thread(flood, stack))
        # They are all still held open at the other end.
        await until(lambda: _is_at_most(honest, descriptors + MAX_STRANGERS), "few strangers are left")
    assert honest.resident_mib - resident_mib < FEW_MIB
    await until(lambda: _is_at_most(honest, descriptors), "every descriptor is given back")


async def _is_at_most(honest: Honest, most: int) -> bool:
    return honest.num_descriptors <= most
