"""Prefill and decode on one device, in two real node processes: the tokens are those of one engine on the CPU."""

import tempfile
from pathlib import Path

from pdserve.client import Options
from pdserve.core.work import Sampling
from pdserve.engine.engine import Engine
from tests.e2e.cluster import start_cluster
from tests.e2e.tiny_model import write_tiny_model
from tests.engine.small import Generation, generate

ON_GPU = ("--device", "cuda", "--dtype", "float32", "--attention-backend", "triton")
NUM_TOKENS = 24
KINDS = {"greedy": Sampling(), "sampled": Sampling(1.0, seed=2**63 + 11)}


async def answers_agree(options: tuple[str, ...] = ON_GPU) -> list[str]:
    """Return a line for greedy and one for sampled answers; each begins with `ok` or `WRONG`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "tiny")
        prompts = [tuple(range(5, 5 + length)) for length in (3, 40, 90)]
        engine = Engine.load(model, num_blocks=64)
        expected = [[_expected(engine, prompt, how) for prompt in prompts] for how in KINDS.values()]
        node = (*options, "--kv-blocks", "64")
        async with start_cluster(
            model, folder, prefill=((*node, "--token-budget", "32"),), decode=((*node, "--block-size", "32"),)
        ) as cluster:
            found = [
                [tuple((await cluster.answer(prompt, _options(how))).token_ids) for prompt in prompts]
                for how in KINDS.values()
            ]
            await cluster.leak_oracle()
    return [
        f"{'ok' if ours == theirs else 'WRONG'}: prefill and decode processes on one device, {kind}, {len(prompts)} prompts"
        for kind, ours, theirs in zip(KINDS, found, expected, strict=True)
    ]


def _expected(engine: Engine, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    generation = Generation(engine, prompt, 0, sampling)
    generate(engine, [generation], NUM_TOKENS)
    return tuple(generation.output)


def _options(how: Sampling) -> Options:
    return Options(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=how.temperature, seed=how.seed)
