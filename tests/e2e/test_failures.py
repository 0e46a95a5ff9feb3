"""Kills, freezes, evictions: any process may die at any moment, and no client loses its answer."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from pdserve.client import Answer, Chat, Options, Turn
from pdserve.core.cluster_secret import ClusterSecret
from pdserve.core.errors import InvalidRequest, PdserveError, Unauthenticated
from pdserve.node.process import EXIT_STUCK
from tests.e2e.cluster import DEADLINE_S, Cluster, first_of, start_cluster, until
from tests.e2e.tiny_model import decided_prompts, expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

NUM_TOKENS = 24


async def two_answers(cluster: Cluster, prompt: list[int]) -> list["asyncio.Task[Answer]"]:
    """Start two requests, so that each of two nodes gets one."""
    return [asyncio.create_task(cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))) for _ in range(2)]


async def assert_both_exact(tasks: "list[asyncio.Task[Answer]]", folder: Path, prompt: list[int]) -> list[Answer]:
    tokens, _ = expected_tokens(folder, prompt, NUM_TOKENS)
    answers = await asyncio.gather(*tasks)
    for answer in answers:
        assert answer.token_ids == tokens
        assert answer.summary is not None
        assert answer.summary.usage.completion_tokens == NUM_TOKENS
    return answers


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=["killed", "frozen", "drained"]
)
async def test_a_decode_node_lost_in_mid_stream(tiny: Path, tmp_path: Path, number: int) -> None:
    """The answer is complete and exact, and the other node makes only what was missing."""
    held_at = 8
    async with start_cluster(tiny, tmp_path, decode=(("--hold-at", f"decoding:{held_at}"), ())) as cluster:
        prompt = prompt_ids("a decode node is lost")
        tasks = await two_answers(cluster, prompt)
        await cluster.until_held("decode0")
        await first_of(tasks)
        before = await cluster.gauge("decode1", "forwards")
        cluster.nodes["decode0"].kill(number)
        answers = await assert_both_exact(tasks, tiny, prompt)
        assert sorted(answer.summary.timeline.attempts for answer in answers if answer.summary) == [1, 2]
        # Token 8 is sampled by the new prefill; the new decode node makes the rest.
        assert await cluster.gauge("decode1", "forwards") - before == NUM_TOKENS - held_at - 1
        if number == signal.SIGTERM:
            drained = [stall.cause for answer in answers if answer.summary for stall in answer.summary.timeline.stalls]
            assert drained == ["draining"]
            cluster.nodes["decode0"].popen.wait(DEADLINE_S)
        if number == signal.SIGSTOP:
            cluster.nodes["decode0"].kill(signal.SIGCONT)
            await cluster.until_ready(3)
        await cluster.leak_oracle()


async def test_a_prefill_node_killed_during_a_long_prompt(tiny: Path, tmp_path: Path) -> None:
    options = ("--token-budget", "16")
    async with start_cluster(tiny, tmp_path, prefill=((*options, "--hold-at", "prefilling:2"), options)) as cluster:
        prompt = [3 + i % 200 for i in range(400)]
        tasks = await two_answers(cluster, prompt)
        await cluster.until_held("prefill0")
        cluster.nodes["prefill0"].kill()
        await assert_both_exact(tasks, tiny, prompt)
        await cluster.leak_oracle()


async def test_a_prefill_node_killed_while_handing_over(tiny: Path, tmp_path: Path) -> None:
    """The client has its first token already; it is never sampled again."""
    async with start_cluster(tiny, tmp_path, prefill=(("--hold-at", "handing_over"), ())) as cluster:
        prompt = prompt_ids("handing over")
        tasks = await two_answers(cluster, prompt)
        await cluster.until_held("prefill0")
        cluster.nodes["prefill0"].kill()
        await assert_both_exact(tasks, tiny, prompt)
        await cluster.leak_oracle()


@pytest.mark.parametrize("seed", [None, 11], ids=["greedy", "seeded"])
async def test_a_resume_gives_the_same_tokens(tiny: Path, tmp_path: Path, seed: int | None) -> None:
    """Failure classes 19 and 32: seeded text does not change when a node is lost."""
    options = Options(max_tokens=NUM_TOKENS, temperature=None if seed is None else 1.2, top_p=0.95, seed=seed)
    async with start_cluster(tiny, tmp_path, decode=(("--hold-at", "decoding:6"), ())) as cluster:
        tasks = [asyncio.create_task(cluster.answer("again and again", options)) for _ in range(2)]
        await cluster.until_held("decode0")
        cluster.nodes["decode0"].kill()
        first, second = await asyncio.gather(*tasks)
        assert first.token_ids == second.token_ids
        assert len(first.token_ids) == NUM_TOKENS


async def test_a_second_signal_ends_a_node_at_once(tiny: Path, tmp_path: Path) -> None:
    """Whatever its threads do; the other node takes over."""
    async with start_cluster(tiny, tmp_path, decode=(("--hold-at", "decoding:8"), ())) as cluster:
        prompt = prompt_ids("two signals")
        tasks = await two_answers(cluster, prompt)
        await cluster.until_held("decode0")
        lost = cluster.nodes["decode0"]
        lost.kill(signal.SIGTERM)

        async def is_draining() -> bool:
            return await cluster.gauge("decode0", "draining") == 1

        await until(is_draining, "the node drains")
        lost.kill(signal.SIGTERM)
        assert lost.popen.wait(DEADLINE_S) == EXIT_STUCK
        await assert_both_exact(tasks, tiny, prompt)
        await cluster.leak_oracle()


async def test_chat_needs_a_template(tiny_without_chat: Path, tmp_path: Path) -> None:
    async with start_cluster(tiny_without_chat, tmp_path) as cluster:
        with pytest.raises(InvalidRequest, match="template") as raised:
            await cluster.answer(Chat((Turn("user", "hi"),)), Options(max_tokens=4))
        assert raised.value.field == "chat"
        assert raised.value.hint
        assert len((await cluster.answer("plain text", Options(max_tokens=4))).token_ids) == 4
        await cluster.leak_oracle()


async def test_no_other_node_is_a_typed_error_that_counts(tiny: Path, tmp_path: Path) -> None:
    async with start_cluster(
        tiny, tmp_path, decode=(("--hold-at", "decoding:8"),), router=("--resume-wait-s", "1")
    ) as cluster:
        task = asyncio.create_task(cluster.answer("alone", Options(max_tokens=NUM_TOKENS)))
        await cluster.until_held("decode0")
        cluster.nodes["decode0"].kill()
        with pytest.raises(PdserveError) as raised:
            await task
        assert raised.value.metadata["num_tokens_sent"] == "8"
        assert raised.value.can_retry
        await cluster.leak_oracle()


async def ask_until(stop: asyncio.Event, cluster: Cluster, prompt: list[int], tokens: list[int]) -> int:
    """Ask one question after another, and count the answers. None may be wrong; while a pool is empty there may be none."""
    num_answers = 0
    while not stop.is_set():
        try:
            answer = await cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
        except PdserveError as error:
            assert error.can_retry, error
            await cluster.until_ready(2)
            continue
        assert answer.token_ids == tokens
        num_answers += 1
    return num_answers


async def test_a_node_that_comes_back_on_its_port_is_used_again(tiny: Path, tmp_path: Path) -> None:
    """Failure classes 6 and 23: under load, a restarted peer is a new peer, and one failure poisons nothing."""
    async with start_cluster(tiny, tmp_path) as cluster:
        prompt = prompt_ids("come back")
        tokens, _ = expected_tokens(tiny, prompt, NUM_TOKENS)

        async def is_busy() -> bool:
            return len((await cluster.state()).sessions) > 1

        for role in ("decode", "prefill", "decode"):
            stop = asyncio.Event()
            load = [asyncio.create_task(ask_until(stop, cluster, prompt, tokens)) for _ in range(4)]
            lost = cluster.nodes[f"{role}0"]
            await until(is_busy, "requests are under way")
            lost.kill()
            await asyncio.to_thread(cluster.start_node, role, f"{role}0", port=int(lost.grpc.rpartition(":")[2]))
            await cluster.until_ready(2)
            answer = await cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
            assert answer.token_ids == tokens
            stop.set()
            assert min(await asyncio.gather(*load)) > 0, "a client got no answer after the restart"
            await cluster.leak_oracle()


async def test_eviction_is_resumed_and_exact(tiny: Path, tmp_path: Path) -> None:
    """Failure class 9: blocks run out while sequences grow; the youngest gives way and nobody notices."""
    async with start_cluster(
        tiny, tmp_path, decode=(("--block-size", "4", "--kv-blocks", "26", "--growth-blocks", "0"),)
    ) as cluster:
        prompts = decided_prompts(tiny, 5, 14, 60)
        answers = await asyncio.gather(*(cluster.answer(tuple(p), Options(max_tokens=60)) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == expected_tokens(tiny, prompt, 60)[0]
        assert await cluster.gauge("decode0", "decode.evicted_total") > 0
        await cluster.leak_oracle()


async def test_a_frozen_router_leaks_nothing(tiny: Path, tmp_path: Path) -> None:
    """Each time its nodes take its stream away; tasks and connections of the lost streams must go."""
    async with start_cluster(tiny, tmp_path, router=("--lease-s", "1.5", "--beat-s", "0.25")) as cluster:

        async def num_streams() -> float:
            return sum([await cluster.gauge(name, "routers") for name in cluster.nodes])

        async def is_alone() -> bool:
            return await num_streams() == 0

        async def is_back() -> bool:
            return await num_streams() == 2

        for _ in range(3):
            cluster.router.kill(signal.SIGSTOP)
            await until(is_alone, "the nodes gave the router up")
            cluster.router.kill(signal.SIGCONT)
            await until(is_back, "the router is attached again")
            await cluster.until_ready(2)
        await cluster.leak_oracle()
        prompt = prompt_ids("thawed")
        answer = await cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
        assert answer.token_ids == expected_tokens(tiny, prompt, NUM_TOKENS)[0]


async def test_a_secret_keeps_strangers_out(tiny: Path, tmp_path: Path) -> None:
    async with start_cluster(tiny, tmp_path, secret="a secret of the test") as cluster:
        prompt = prompt_ids("secret")
        options = Options(max_tokens=NUM_TOKENS)
        assert (await cluster.answer(tuple(prompt), options)).token_ids == expected_tokens(tiny, prompt, NUM_TOKENS)[0]
        await cluster.leak_oracle()
        cluster.secret = ClusterSecret(b"a guess")
        with pytest.raises(Unauthenticated, match="does not prove"):
            await cluster.node_state("decode0")
        cluster.secret = None
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await cluster.node_state("decode0")
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await cluster.client.close()
        cluster.router.kill()
        cluster.start_router("--cluster-secret", "another")

        async def refused() -> bool:
            nodes = (await cluster.state()).nodes
            return all(node.state != "ready" and "secret" in node.reason for node in nodes)

        await until(refused, "both nodes turn the router away")


async def test_deltas_arrive_while_decoding_goes_on(tiny: Path, tmp_path: Path) -> None:
    """The client holds token k before the decode node samples token k + 8: here the node stands still at index 8."""
    async with start_cluster(tiny, tmp_path, decode=(("--hold-at", "decoding:8"),)) as cluster:
        answer = Answer()

        async def read() -> None:
            async for part in cluster.client.generate("slow", Options(max_tokens=NUM_TOKENS)):
                answer.add(part)

        async def all_came() -> bool:
            return len(answer.token_ids) == 8

        task = asyncio.create_task(read())
        await cluster.until_held("decode0")
        await until(all_came, "8 tokens reached the client")
        caught = " ".join(await cluster.leaks())
        assert "decode0: legs = 1" in caught, "the leak oracle must see what is under way"
        assert "blocks are free" in caught
        assert "router: sessions" in caught
        task.cancel()
        await asyncio.wait({task})
        await cluster.leak_oracle()
