"""The cluster secret over running processes: changed step by step, with requests going on."""

import asyncio
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, Options
from pdserve.core.cluster_secret import ClusterSecret
from tests.e2e.cluster import Cluster, Process, start_cluster, start_process, until
from tests.e2e.tiny_model import expected_tokens, prompt_ids

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

OLD, NEW = "the old secret of the test", "the new secret of the test"
NUM_TOKENS = 16
READ_ANEW = "the cluster secret was read anew"


def write(path: Path, *values: str) -> None:
    """Write a secret as a careful operator does, from one moment to the next."""
    beside = path.with_suffix(".new")
    beside.touch(0o600)
    beside.write_text("\n".join(values) + "\n", encoding="utf-8")
    beside.replace(path)


async def all_read(processes: list[Process], number: int) -> None:
    """Wait until each of them took the values of its file for the `number`th time."""

    async def have() -> bool:
        return all(process.log.read_text(errors="replace").count(READ_ANEW) >= number for process in processes)

    await until(have, f"change {number} is read by {len(processes)} processes")


async def a_new_router_serves(cluster: Cluster, tiny: Path, file: Path, *options: str) -> None:
    """Start another router with the secret of `file`: it must be taken by all nodes, and answer exactly."""
    arguments = ["router", "--model", cluster.model, "--port", "0", "--cluster-secret-file", str(file), *options]
    router = start_process("router-b", arguments, cluster.folder)
    try:
        async with AsyncClient(router.grpc) as client:

            async def ready() -> bool:
                return all(node.state == "ready" for node in (await client.cluster_state()).nodes)

            await until(ready, "the new router is taken by its nodes")
            answer = await client.complete(tuple(prompt_ids("new")), Options(max_tokens=NUM_TOKENS))
        assert answer.token_ids == expected_tokens(tiny, prompt_ids("new"), NUM_TOKENS)[0]
    finally:
        router.kill()


@pytest.mark.deep
async def test_a_secret_is_changed_under_way_and_no_request_fails(tiny: Path, tmp_path: Path) -> None:
    of_nodes, of_router = tmp_path / "nodes.secret", tmp_path / "router.secret"
    for file in (of_nodes, of_router):
        write(file, OLD)
    node_options = ("--cluster-secret-file", str(of_nodes))
    async with start_cluster(
        tiny,
        tmp_path,
        prefill=(node_options,),
        decode=(node_options,),
        router=("--cluster-secret-file", str(of_router)),
        secret=OLD,
        is_told=False,
    ) as cluster:
        nodes = list(cluster.nodes.values())
        pool = [f"--{node.arguments[0]}={node.grpc}" for node in nodes]
        is_over = asyncio.Event()
        num_answers = 0

        async def ask_on_and_on() -> None:
            nonlocal num_answers
            prompt = prompt_ids("under way")
            while not is_over.is_set():
                answer = await cluster.answer(tuple(prompt), Options(max_tokens=NUM_TOKENS))
                assert answer.token_ids == expected_tokens(tiny, prompt, NUM_TOKENS)[0]
                num_answers += 1

        asking = asyncio.create_task(ask_on_and_on())
        try:
            for number, values in enumerate(((OLD, NEW), (NEW, OLD), (NEW,)), 1):
                changes = [(of_nodes, nodes), (of_router, [cluster.router])]
                for file, processes in changes if number % 2 else reversed(changes):
                    before = num_answers
                    write(file, *values)
                    await all_read(processes, number)
                    await a_new_router_serves(cluster, tiny, of_router, *pool)
                    assert not asking.done()
                    assert num_answers > before
        finally:
            is_over.set()
            await asking
        # A node that starts now knows the new value only, and its KV link too.
        late = cluster.start_node("decode", "late", *node_options)
        await a_new_router_serves(cluster, tiny, of_router, pool[0], f"--decode={late.grpc}")
        cluster.secret = ClusterSecret(NEW.encode())
        await cluster.leak_oracle()
