"""Each end of a running transfer dies, freezes and comes back at each stage of the prompt: exact answers, nothing left.

Failure classes 5, 6 and 22. `test_failures.py` has the cells after adoption, and those without a transfer.
"""

import asyncio
import signal
from pathlib import Path

import pytest

from pdserve.client import Answer, Options
from tests.e2e.cluster import Cluster, first_of, start_cluster, until
from tests.e2e.tiny_model import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NUM_TOKENS = 12
CHUNKS = ("--token-budget", "16")
QUICK = ("--lease-s", "1.5", "--beat-s", "0.25")
STAGES = ("queued", "prefilling:1", "handing_over")


async def held_at(cluster: Cluster, node: str, prompt: list[int]) -> "list[asyncio.Task[Answer]]":
    """Start two requests, one for each prefill node, and wait until one stands at its stage and the other is done."""
    options = Options(max_tokens=NUM_TOKENS)
    tasks = [asyncio.create_task(cluster.answer(tuple(prompt), options)) for _ in range(2)]
    await cluster.until_held(node)
    await first_of(tasks)
    return tasks


async def decode_end(cluster: Cluster) -> str:
    """Return the decode node that the held transfer goes to."""
    found: list[str] = []

    async def one_has_it() -> bool:
        found[:] = [name for name in ("decode0", "decode1") if await cluster.gauge(name, "kv_transfers") == 1]
        return len(found) == 1

    await until(one_has_it, "one decode node expects the transfer")
    return found[0]


async def exact(tasks: "list[asyncio.Task[Answer]]", folder: Path, prompt: list[int]) -> None:
    tokens, _ = expected_tokens(folder, prompt, NUM_TOKENS)
    for answer in await asyncio.gather(*tasks):
        assert answer.token_ids == tokens


async def restart(cluster: Cluster, name: str, *options: str) -> None:
    """Kill a node and start another at its port, which the router has to take for a new one."""
    lost = cluster.nodes[name]
    lost.kill()
    role = lost.arguments[0]
    cluster.start_node(role, name, *options, port=int(lost.grpc.rpartition(":")[2]))


async def test_each_end_is_killed_and_restarted_at_its_port_at_each_stage(tiny: Path, tmp_path: Path) -> None:
    held = [(*CHUNKS, "--hold-at", stage) for stage in STAGES]
    async with start_cluster(tiny, tmp_path, prefill=(held[0], CHUNKS), decode=((), ())) as cluster:
        for number, stage in enumerate(STAGES):
            # A prompt of its own length per stage, so that no two are alike.
            prompt = [3 + (number * 7 + i) % 200 for i in range(80 + number)]
            tasks = await held_at(cluster, "prefill0", prompt)
            await restart(cluster, await decode_end(cluster))
            # What comes back to the holding node stands there again, until that one dies too.
            await restart(cluster, "prefill0", *(held[number + 1] if number + 1 < len(held) else CHUNKS))
            await exact(tasks, tiny, prompt)
            print(f"{stage}: both ends killed, answers exact")  # noqa: T201 - the record of the run
            await cluster.until_ready(4)
            await cluster.leak_oracle()


async def test_each_end_is_frozen_while_handing_over(tiny: Path, tmp_path: Path) -> None:
    """A frozen end is given up after its lease, and takes part again once it thaws."""
    holding = (*CHUNKS, *QUICK, "--hold-at", "handing_over")
    async with start_cluster(
        tiny, tmp_path, prefill=(holding, (*CHUNKS, *QUICK)), decode=(QUICK, QUICK), router=QUICK
    ) as cluster:
        prompt = [5 + i % 190 for i in range(70)]
        tasks = await held_at(cluster, "prefill0", prompt)
        frozen = [await decode_end(cluster), "prefill0"]
        for name in frozen:
            cluster.nodes[name].kill(signal.SIGSTOP)
        await exact(tasks, tiny, prompt)
        for name in frozen:
            cluster.nodes[name].kill(signal.SIGCONT)
        await cluster.until_ready(4)
        await cluster.leak_oracle()


async def test_answers_are_exact_over_a_slow_faulty_and_encrypted_link(tiny: Path, tmp_path: Path) -> None:
    """The options of the link on real processes: attempts fail by name and are made again."""
    safe = (*QUICK, "--kv-encryption", "curve")
    out = ("--kv-link", "200Mbps,1ms,0.5ms", "--kv-faults", "corrupt@3,drop@9,disconnect@14,duplicate=0.02,seed=7")
    async with start_cluster(
        tiny, tmp_path, prefill=((*safe, *out),), decode=(safe,), router=QUICK, secret="a secret of the test"
    ) as cluster:
        prompts = [[3 + (number + i) % 200 for i in range(20 + number)] for number in range(6)]
        for prompt in prompts:
            await exact(
                [asyncio.create_task(cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS)))], tiny, prompt
            )
        assert await cluster.gauge("prefill0", "kv_faults_injected_total") >= 3
        assert await cluster.gauge("prefill0", "kv_link_shaped") == 1
        log = cluster.nodes["prefill0"].log.read_text(encoding="utf-8")
        assert log.count("EXPERIMENT") == 2
        await cluster.leak_oracle()
