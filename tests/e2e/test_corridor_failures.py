"""Each end of a transfer dies, freezes and comes back, alone, at each stage of a request: exact answers, nothing left.

Failure classes 1, 5, 6, 22, 23 and 27. `test_failures.py` has what needs no transfer.

Four prefill nodes and one decode node: three prefill nodes hold first attempts at one stage each, the fourth holds none and the
decode node holds what it decodes. So one fault meets every stage at once, and each request has exactly one faulty end. With a
single decode node, an attempt that follows its fault goes to the process that froze, or to the one that took its place.
What is killed is killed in every run; what is frozen is frozen in `make test-deep`.

| request stands at | its prefill node frozen | killed, restarted | its decode node frozen | killed, restarted |
|---|---|---|---|---|
| queued | by prefill3 | by prefill3 | by decode0, thawed | by the new decode0 |
| prefilling:1 | by prefill3 | by prefill3 | by decode0, thawed | by the new decode0 |
| handing_over | by prefill3; its late frames come | by prefill3 | by decode0, thawed | by the new decode0 |
| decoding:4 | goes on undisturbed | goes on undisturbed | by decode0, thawed | by the new decode0 |

"""

import asyncio
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import Answer, Options
from tests.e2e.cluster import DEADLINE_S, Cluster, start_cluster, until
from tests.e2e.tiny_model import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NUM_TOKENS = 12
CHUNKS = ("--token-budget", "16")
QUICK = ("--lease-s", "1.5", "--beat-s", "0.25")
HOLDERS = {"prefill0": "queued", "prefill1": "prefilling:1", "prefill2": "handing_over"}
FREE, DECODE = "prefill3", "decode0"
NUM_NODES = 5
READY, NOT_READY = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
MOST_TRIES = 4
"""A thawed node may hear that it was given up before its late frames are out; then it is frozen again."""
SLOW_LINK = ("--kv-link", "200kbps,1ms")
"""On this link the KV of a held request takes seconds: much of it is still to be sent when its node is frozen."""


@dataclass
class Asked:
    """A request, and the answer that it must get."""

    prompt: list[int]
    task: "asyncio.Task[Answer]"


@dataclass
class Matrix:
    """A cluster whose nodes hold requests, each at its stage. `asked` are those under way."""

    cluster: Cluster
    folder: Path
    asked: list[Asked] = field(default_factory=list)
    num_asked: int = 0

    async def num_held(self, names: Iterable[str] = (*HOLDERS, DECODE)) -> list[float]:
        return [await self.cluster.gauge(name, "held") for name in names]

    async def fill(self, num_tokens: int) -> None:
        """Ask until a request stands at each stage, one by one, so that each goes to the node with the least to do."""
        while 0 in (before := await self.num_held()):
            assert self.num_asked < 40, f"first attempts do not reach every stage: {before}"
            self.num_asked += 1
            # No two prompts are alike, in no token range.
            prompt = [3 + (self.num_asked * 11 + i) % 200 for i in range(num_tokens + self.num_asked)]
            answer = self.cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
            self.asked.append(Asked(prompt, asyncio.create_task(answer)))

            async def stands() -> bool:
                return sum(await self.num_held()) > sum(before)

            await until(stands, f"request {self.num_asked} stands at its stage")

    async def until_missed(self, name: str) -> None:
        """Wait until the router has given a node up."""
        address = self.cluster.nodes[name].grpc

        async def is_missed() -> bool:
            return all(node.state != "ready" for node in (await self.cluster.state()).nodes if node.address == address)

        await until(is_missed, f"{name} is missed by the router")

    async def until_health(self, name: str, status: int) -> None:
        """Wait until a node's own health says so (failure class 27)."""
        async with grpc.aio.insecure_channel(self.cluster.nodes[name].grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def says() -> bool:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
                return bool(answer.status == status)

            await until(says, f"the health of {name} is {status}")

    async def until_answered(self, num_left: float) -> None:
        """Wait until all but `num_left` answers are whole, and compare: every one of them took a second attempt."""

        async def answered() -> bool:
            return sum(not each.task.done() for each in self.asked) <= num_left

        await until(answered, f"all but {num_left:g} requests are answered")
        done = [each for each in self.asked if each.task.done()]
        for each in done:
            answer = await each.task
            assert answer.token_ids == expected_tokens(self.folder, each.prompt, NUM_TOKENS)[0]
            assert answer.summary is not None
            assert answer.summary.timeline.attempts >= 2, "its node was lost, and it did not notice"
        self.asked = [each for each in self.asked if each not in done]

    async def until_linked(self) -> None:
        """Wait until each node has a connection to each present peer, and none to those that are gone."""

        async def linked() -> bool:
            links = [await self.cluster.gauge(name, "kv_links") for name in (*HOLDERS, FREE, DECODE)]
            return links == [1, 1, 1, 1, NUM_NODES - 1]

        await until(linked, "only present peers are linked")

    async def num_late(self) -> float:
        """Messages that the decode node got on connections which it had given up."""
        num_late = await self.cluster.gauge(DECODE, "kv_strange_total")
        print(f"{num_late:g} frames came late")  # noqa: T201 - the record of the run
        return num_late

    async def lose(self, fault: int, *names: str) -> None:
        """Freeze or kill nodes."""
        for name in names:
            self.cluster.nodes[name].kill(fault)

    async def bring_back(self, fault: int, *names: str) -> None:
        """Thaw nodes, or start others at their ports; the router and the peers have to take those for new ones."""
        if fault == signal.SIGSTOP:
            for name in names:
                self.cluster.nodes[name].kill(signal.SIGCONT)
        else:
            await asyncio.gather(*(asyncio.to_thread(self._start_again, name) for name in names))
        await self.cluster.until_ready(NUM_NODES)

    def _start_again(self, name: str) -> None:
        lost = self.cluster.nodes[name]
        role, options = lost.arguments[0], lost.arguments[5:]
        self.cluster.start_node(role, name, *options, port=int(lost.grpc.rpartition(":")[2]))


async def lose_prefill_ends(matrix: Matrix, fault: int) -> None:
    """The first two columns, or the next two: who waits for a prefill node goes to another, who decodes needs none."""
    await matrix.fill(140)
    (num_decoding,) = await matrix.num_held([DECODE])
    await matrix.lose(fault, *HOLDERS)
    await matrix.until_answered(num_decoding)
    await matrix.bring_back(fault, *HOLDERS)
    await matrix.lose(fault, FREE)
    await matrix.until_missed(FREE)
    await matrix.bring_back(fault, FREE)
    assert await matrix.num_held([DECODE]) == [num_decoding], "what decodes was disturbed by a prefill node"


async def lose_decode_end(matrix: Matrix, fault: int) -> None:
    """What waits and what decodes goes to the process that comes back."""
    await matrix.fill(20)
    await matrix.until_health(FREE, READY)
    await matrix.lose(fault, DECODE)
    await matrix.until_missed(DECODE)
    await matrix.until_health(FREE, NOT_READY)
    await matrix.bring_back(fault, DECODE)
    await matrix.until_health(FREE, READY)
    await matrix.until_answered(0)
    await matrix.until_linked()
    await matrix.cluster.leak_oracle()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.deep),
    ],
)
async def test_each_end_is_lost_alone_at_each_stage(tiny: Path, tmp_path: Path, fault: signal.Signals) -> None:
    holders = tuple((*CHUNKS, *QUICK, "--hold-at", stage) for stage in HOLDERS.values())
    prefill = (*holders[:-1], (*holders[-1], *SLOW_LINK), (*CHUNKS, *QUICK))
    decode = ((*QUICK, "--hold-at", "decoding:4"),)
    async with start_cluster(tiny, tmp_path, prefill=prefill, decode=decode, router=QUICK) as cluster:
        matrix = Matrix(cluster, tiny)
        for _ in range(MOST_TRIES):
            await lose_prefill_ends(matrix, fault)
            if fault == signal.SIGKILL or await matrix.num_late() > 0:
                break
        else:
            pytest.fail("no frame of a frozen node came after its attempt was over")
        await lose_decode_end(matrix, fault)


async def test_answers_are_exact_over_a_slow_faulty_and_encrypted_link(tiny: Path, tmp_path: Path) -> None:
    """The options of the link on real processes: attempts fail by name and are made again."""
    safe = (*QUICK, "--kv-encryption", "curve")
    out = ("--kv-link", "200Mbps,1ms,0.5ms", "--kv-faults", "corrupt@3,drop@9,disconnect@14,duplicate=0.02,seed=7")
    async with start_cluster(
        tiny, tmp_path, prefill=((*safe, *out),), decode=(safe,), router=QUICK, secret="a secret of the test"
    ) as cluster:
        prompts = [[3 + (number + i) % 200 for i in range(20 + number)] for number in range(6)]
        for prompt in prompts:
            answer = await cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
            assert answer.token_ids == expected_tokens(tiny, prompt, NUM_TOKENS)[0]
        assert await cluster.gauge("prefill0", "kv_faults_injected_total") >= 3
        assert await cluster.gauge("prefill0", "kv_link_shaped") == 1
        log = cluster.nodes["prefill0"].log.read_text(encoding="utf-8")
        assert log.count("EXPERIMENT") == 2
        await cluster.leak_oracle()


@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=pytest.mark.deep)])
async def test_a_connection_that_breaks_in_mid_transfer_costs_no_attempt(tiny: Path, tmp_path: Path, side: str) -> None:
    """The KV still stands in the prefill node's pool: it goes again over the next connection, and nobody computes twice.

    Breaks are so far apart that none meets a transfer more often than it may be opened again. What the decode node breaks may be
    its answer, after which it has nothing to open again.
    """
    every = 45 if side == "prefill" else 5
    breaks = ("--kv-faults", ",".join(f"disconnect@{every * number}" for number in range(1, 6)))
    prefill = (*CHUNKS, *(breaks if side == "prefill" else ()))
    async with start_cluster(
        tiny, tmp_path, prefill=(prefill,), decode=(breaks if side == "decode" else (),)
    ) as cluster:
        nodes = ("prefill0", "decode0")
        for number in range(6):
            prompt = [3 + (number * 7 + i) % 200 for i in range(400)]
            answer = await cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
            assert answer.token_ids == expected_tokens(tiny, prompt, NUM_TOKENS)[0]
            assert answer.summary is not None
            assert answer.summary.timeline.attempts == 1
        num_reopened = [await cluster.gauge(node, "kv_reopened_total") for node in nodes]
        print(f"transfers opened again on {nodes}: {num_reopened}")  # noqa: T201 - the record of the run
        assert num_reopened[0] >= 1, "no break met a transfer"
        assert num_reopened[1] >= 1 or side == "decode"
        assert [await cluster.gauge(node, "kv_failed_total") for node in nodes] == [0, 0]
        for node, times in zip(nodes, num_reopened, strict=True):
            log = cluster.nodes[node].log.read_text(encoding="utf-8")
            assert log.count("goes on over a new connection") == times
        await cluster.leak_oracle()
