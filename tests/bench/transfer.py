"""`make bench-transfer`: KV transfer beside raw TCP and memcpy, in one run. Ratios are what to quote; they are the gates.

Prints one JSON record, and the gates with their outcome; ends with status 1 if a gate failed. `--quick` measures less often;
`--rates`, `--hidden` and `--model` choose parts.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pdserve.client import Options
from pdserve.core.clock import SystemClock
from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.models import DEFAULT_MODEL
from pdserve.kvtransfer.channel import Channel
from pdserve.kvtransfer.curve import listener_keys
from pdserve.kvtransfer.shared_channel import SharedMemoryChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel
from tests.bench.machine import describe_machine
from tests.bench.transfer_ends import Copies, MakeChannel, Taken, corridor, memcpy_bytes_per_s, raw_tcp
from tests.e2e.cluster import Cluster, start_cluster

LLAMA_8B = KvLayout((LayerLayout(8, 128, 128),) * 32, "bfloat16")
"""128 KiB for each token."""
SMOLLM2 = KvLayout((LayerLayout(3, 64, 64),) * 30, "float32")
"""45 KiB for each token."""
SIZES = {"1 MiB": 8, "4 MiB": 32, "16 MiB": 128, "64 MiB": 512}
"""Tokens of the 8B layout."""
PARTS = {"--rates", "--hidden", "--model"}
KEYS = listener_keys(b"of this benchmark")
LENGTHS = (256, 1024, 4096)


def shared_memory() -> Channel:
    """Return a channel that shares memory with others of this host."""
    return SharedMemoryChannel(ZeroMqChannel(), SystemClock())


def encrypted() -> Channel:
    """Return a channel that encrypts with CURVE."""
    return ZeroMqChannel(KEYS)


CHANNELS: dict[str, tuple[MakeChannel, Copies]] = {
    "tcp": (ZeroMqChannel, Copies(packs=False, places=False)),
    "shared memory": (shared_memory, Copies(packs=True, places=False)),
    "tcp, CURVE": (encrypted, Copies(packs=False, places=False)),
}
ROWS = {
    row: (make_channel, copies)
    for name, (make_channel, bare) in CHANNELS.items()
    for row, copies in ((name, bare), (f"{name}, with the pools' copies", Copies()))
}
IN_FLIGHT = 8
"""Transfers between OPEN and ACK at once, as on a node under load."""
ROUND_BYTES = 64 << 20
LONE = 5
"""Transfers of a round that are moved one after another."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A ratio of transport-facts, measured in this run."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the ratio is inside its bound."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bound = f"≥ {self.at_least}" if self.at_least is not None else f"≤ {self.at_most}"
        return f"{'pass' if self.holds else 'FAIL'}  {self.name}: {self.value:.2f} ({bound})"


def say(text: str) -> None:
    """Tell a person how far it is."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress


def rates(num_rounds: int) -> tuple[dict[str, object], list[Gate]]:
    """Measure raw TCP and every channel at every size, in rounds turn by turn, so that a busy moment hits all alike."""
    found: dict[str, object] = {"memcpy_gb_per_s": round(memcpy_bytes_per_s() / 1e9, 2)}
    gates: list[Gate] = []
    for size, num_tokens in SIZES.items():
        say(f"rates at {size} …")
        row, more = _rates_at(size, num_tokens, num_rounds)
        found[size] = row
        gates += more
    return found, gates


def _rates_at(size: str, num_tokens: int, num_rounds: int) -> tuple[dict[str, object], list[Gate]]:
    num_bytes = LLAMA_8B.range_bytes(range(32), num_tokens)
    num = max(2 * IN_FLIGHT, ROUND_BYTES // num_bytes)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(raw_tcp(num_bytes))
        corridors = {
            name: stack.enter_context(corridor(LLAMA_8B, make_channel, copies))
            for name, (make_channel, copies) in ROWS.items()
        }
        raws, rounds, alone = [], {name: list[Taken]() for name in ROWS}, {name: list[float]() for name in ROWS}
        raw_alone = []
        for number in range(num_rounds + 1):
            taken_raw = raw.round(num, IN_FLIGHT)
            lone_raw = median(raw.alone(LONE))
            taken = {name: both.round(num_tokens, num, IN_FLIGHT) for name, both in corridors.items()}
            lone = {name: median(both.alone(num_tokens, LONE)) for name, both in corridors.items()}
            if number == 0:  # caches, page tables and windows are warm after it
                continue
            raws.append(taken_raw)
            raw_alone.append(lone_raw)
            for name in ROWS:
                rounds[name].append(taken[name])
                alone[name].append(lone[name])
    row: dict[str, object] = {"raw TCP": _row(raws, raw_alone)}
    gates: list[Gate] = []
    for name in ROWS:
        of_raw = median(mine.bytes_per_s / theirs.bytes_per_s for mine, theirs in zip(rounds[name], raws, strict=True))
        cpu = median(mine.cpu_s_per_gb / theirs.cpu_s_per_gb for mine, theirs in zip(rounds[name], raws, strict=True))
        lone_of_raw = median(theirs / mine for mine, theirs in zip(alone[name], raw_alone, strict=True))
        ratios = {"of_raw": of_raw, "cpu_of_raw": cpu, "alone_of_raw": lone_of_raw}
        row[name] = _row(rounds[name], alone[name]) | {key: round(value, 2) for key, value in ratios.items()}
        gates += _gates(name, size, of_raw, cpu)
    return row, gates


def _row(rounds: list[Taken], alone_s: list[float]) -> dict[str, object]:
    return {
        "gb_per_s": round(median(taken.bytes_per_s for taken in rounds) / 1e9, 2),
        "cpu_s_per_gb": round(median(taken.cpu_s_per_gb for taken in rounds), 2),
        "alone_ms": round(1000 * median(alone_s), 2),
    }


def _gates(name: str, size: str, of_raw: float, cpu: float) -> list[Gate]:
    is_small = size == "1 MiB"
    if name == "tcp":
        gates = [Gate(f"tcp of raw TCP at {size}", of_raw, at_least=0.55 if is_small else 0.65)]
        return gates if is_small else [*gates, Gate(f"CPU of tcp, of raw TCP's, at {size}", cpu, at_most=2.0)]
    if name == "shared memory" and not is_small:
        return [Gate(f"shared memory of raw TCP at {size}", of_raw, at_least=1.2)]
    return []


def hidden(layout: KvLayout, repeats: int, make_channel: MakeChannel) -> dict[str, object]:
    """Measure what of a transfer is hidden behind computing that takes 1.25 times and 4 times as long as the transfer alone."""
    found: dict[str, object] = {}
    with corridor(layout, make_channel) as both:
        for num_tokens in LENGTHS:
            both.alone(num_tokens, 1)
            alone_s = median(both.alone(num_tokens, repeats))
            row: dict[str, object] = {"alone_ms": round(1000 * alone_s, 1)}
            for factor in (1.25, 4.0):
                exposed_s = median(both.overlapped(num_tokens, factor * alone_s) for _ in range(repeats))
                row[f"compute {factor} times as long"] = {
                    "exposed_ms": round(1000 * exposed_s, 1),
                    "hidden": round(max(0.0, 1 - exposed_s / alone_s), 3),
                }
            found[f"{num_tokens} tokens"] = row
    return found


async def model_exposed(folder: Path, repeats: int) -> dict[str, object]:
    """Return what SmolLM2's own prefill leaves exposed on a real cluster, beside how long the prefill took."""
    found: dict[str, object] = {}
    blocks = ("--kv-blocks", "600")
    async with start_cluster(DEFAULT_MODEL, folder, prefill=(blocks,), decode=(blocks,)) as cluster:
        await _asked(cluster, 64, 0)
        for num_tokens in LENGTHS:
            asked = [await _asked(cluster, num_tokens, 1 + number) for number in range(repeats)]
            exposed, ttft, placed = (median(column) for column in zip(*asked, strict=True))
            found[f"{num_tokens} tokens"] = {
                "ttft_ms": round(1000 * ttft),
                "exposed_ms": round(1000 * exposed, 1),
                "pack_and_place_ms": round(1000 * placed, 1),
            }
        await cluster.leak_oracle()
    return found


async def _asked(cluster: Cluster, num_tokens: int, number: int) -> tuple[float, float, float]:
    prompt = tuple((13 * i + 7 * number) % 40_000 + 100 for i in range(num_tokens))
    answer = await cluster.answer(prompt, Options(max_tokens=2, ignore_eos=True))
    assert answer.summary is not None
    beside = answer.summary.timeline.overlapped
    return beside.exposed_transfer_s, answer.deltas[0].arrival_s, beside.pack_s + beside.place_s


def main() -> None:
    """Measure, print the record, and judge it."""
    is_quick = "--quick" in sys.argv
    asked = PARTS & set(sys.argv) or PARTS
    repeats = 2 if is_quick else 5
    record: dict[str, object] = {"machine": describe_machine(), "sharing": _sharing()}
    gates: list[Gate] = []
    if "--rates" in asked:
        record["rates"], gates = rates(3 if is_quick else 7)
    for name, (make_channel, _) in list(CHANNELS.items())[:2] if "--hidden" in asked else []:
        for model, layout in (("SmolLM2", SMOLLM2), ("8B", LLAMA_8B)):
            say(f"hidden share, {model}, {name} …")
            record[f"hidden, {model} layout, {name}"] = hidden(layout, repeats, make_channel)
    if "--model" in asked:
        say("SmolLM2 on a cluster …")
        with tempfile.TemporaryDirectory() as folder:
            record["SmolLM2, real prefill"] = asyncio.run(model_exposed(Path(folder), repeats))
    record["gates"] = [str(gate) for gate in gates]
    print(json.dumps(record, indent=2, ensure_ascii=False))  # noqa: T201 - the record
    sys.exit(any(not gate.holds for gate in gates))


def _sharing() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = "4 threads: an application and an I/O thread of libzmq on each side"
    if cores >= 4:
        return f"{cores} cores for {threads}"
    return f"{cores} cores are SHARED by {threads}, and by whatever else runs here"


if __name__ == "__main__":
    main()
