"""Clients that read nothing fill the decode batch; when the bound strikes, their places and blocks are others' at once."""

from pathlib import Path

import pytest

from pdserve.client import Options
from pdserve.v1 import inference_pb2
from tests.e2e.cluster import start_cluster, until
from tests.e2e.tiny_model import decided_prompts, expected_tokens
from tests.rpc.wire import connect

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]

GENERATE = "/pdserve.v1.InferenceService/Generate"
NUM_SILENT, N = 2, 8
RESOURCE_EXHAUSTED = 8
BOUNDS = {
    "bytes": ("--max-unread-bytes", "20000", "--max-unread-s", "600"),
    "time": ("--max-unread-bytes", "100000000", "--max-unread-s", "0.2"),
}


@pytest.mark.parametrize("bound", BOUNDS)
async def test_a_batch_of_silent_clients_is_given_up(bound: str, tiny: Path, tmp_path: Path) -> None:
    """The blocked write held the request: 64 silent sequences made others wait for as long as they had tokens to make."""
    (prompt,) = decided_prompts(tiny, 1, 20, 8)
    batch = ("--max-batch", str(NUM_SILENT * N))
    async with start_cluster(tiny, tmp_path, decode=(batch,), router=BOUNDS[bound]) as cluster:

        async def gave_up() -> bool:
            return (await cluster.state()).gauges["failed_total"] == NUM_SILENT

        async def nodes_are_free() -> bool:
            gauges = [(await cluster.node_state(name)).gauges for name in cluster.nodes]
            return all(not each["legs"] and not each["blocks.used"] and not each["blocks.reserved"] for each in gauges)

        async with connect(int(cluster.router.grpc.rpartition(":")[2])) as wire:
            request = inference_pb2.GenerateRequest(text="x", n=N)
            request.stop.max_tokens, request.stop.ignore_eos = 1000, True
            silent = [wire.streams[wire.call(GENERATE, request.SerializeToString())] for _ in range(NUM_SILENT)]
            await until(gave_up, f"{NUM_SILENT} requests are given up")
            answer = await cluster.answer(tuple(prompt), Options(max_tokens=8))
            assert answer.token_ids == expected_tokens(tiny, prompt, 8)[0]
            await until(nodes_are_free, "the nodes hold nothing")
            if bound == "bytes":
                assert not any(stream.is_ended for stream in silent), "they could still come back, and hear why"
            else:
                await wire.until(lambda: all(stream.ended_with(RESOURCE_EXHAUSTED) for stream in silent))
            assert not wire.is_closed
        await cluster.leak_oracle()
