"""TTFT and ITL of streaming clients on a real cluster, how fast a cancel frees both nodes, and what idling costs."""

import asyncio
import time
from itertools import pairwise
from pathlib import Path

from pdserve.client import Options
from pdserve.core.models import DEFAULT_MODEL
from tests.bench.machine import quantile
from tests.e2e.cluster import Cluster, start_cluster, until

NUM_IN = 256
NUM_OUT = 64
IDLE_S = 10.0


async def measure(folder: Path) -> dict[str, object]:
    """Run everything on one cluster of one prefill and one decode node, one engine thread each."""
    async with start_cluster(DEFAULT_MODEL, folder) as cluster:
        await _client(cluster, 0)
        latency = [await _clients(cluster, number) for number in (1, 4, 16)]
        cancels = await _cancels(cluster)
        idle = await _idle(cluster)
        await cluster.leak_oracle()
    return {"streaming": latency, "cancel_to_baseline": cancels, "idle_cpu_percent": idle}


async def _client(cluster: Cluster, number: int) -> list[float]:
    """Arrival times of one client's tokens, seconds since its call."""
    prompt = tuple((13 * i + 7 * number) % 40_000 + 100 for i in range(NUM_IN))
    answer = await cluster.answer(prompt, Options(max_tokens=NUM_OUT, ignore_eos=True))
    return [delta.arrival_s for delta in answer.deltas for _ in delta.token_ids]


async def _clients(cluster: Cluster, number: int) -> dict[str, object]:
    arrivals = await asyncio.gather(*(_client(cluster, 1 + n) for n in range(number)))
    first = [times[0] for times in arrivals]
    gaps = [later - earlier for times in arrivals for earlier, later in pairwise(times)]
    last = max(times[-1] for times in arrivals)
    return {
        "clients": number,
        "ttft_ms_p50": round(1000 * quantile(first, 0.5)),
        "ttft_ms_max": round(1000 * max(first)),
        "itl_ms_p50": round(1000 * quantile(gaps, 0.5), 1),
        "itl_ms_p99": round(1000 * quantile(gaps, 0.99), 1),
        "tokens_per_s": round(number * NUM_OUT / last, 1),
    }


async def _cancels(cluster: Cluster, number: int = 5) -> dict[str, object]:
    """Seconds from a client's cancel in mid-stream until both pools are at their baseline."""
    taken = []
    for n in range(number):
        stream = cluster.client.generate(tuple(range(100 + n, 400 + n)), Options(max_tokens=200, ignore_eos=True))
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 4:
                break
        began_s = time.perf_counter()
        await stream.aclose()
        await until(lambda: _is_clean(cluster), "both pools are at their baseline")
        taken.append(time.perf_counter() - began_s)
    return {"ms_p50": round(1000 * quantile(taken, 0.5)), "ms_max": round(1000 * max(taken)), "bound": "RTT + a step"}


async def _is_clean(cluster: Cluster) -> bool:
    used = [await cluster.gauge(name, "blocks.used") + await cluster.gauge(name, "legs") for name in cluster.nodes]
    return sum(used) == 0


async def _idle(cluster: Cluster) -> dict[str, float]:
    """CPU per process over 10 idle seconds, percent of one core."""
    import psutil

    processes = {p.name: psutil.Process(p.popen.pid) for p in (cluster.router, *cluster.nodes.values())}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    await asyncio.sleep(IDLE_S)
    spent = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
    return {name: round(100 * cpu_s / IDLE_S, 2) for name, cpu_s in spent.items()}
