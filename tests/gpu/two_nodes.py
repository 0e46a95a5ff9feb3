"""Prefill and decode on one device, in two real node processes: the tokens are those of one engine on the CPU."""

import tempfile
from pathlib import Path

from pdserve.client import Options
from pdserve.engine.engine import Engine
from tests.e2e.cluster import start_cluster
from tests.e2e.tiny_model import write_tiny_model
from tests.engine.small import Generation, generate

ON_GPU = ("--device", "cuda", "--dtype", "float32", "--attention-backend", "triton")
NUM_TOKENS = 24


async def answers_agree(options: tuple[str, ...] = ON_GPU) -> str:
    """Return a line that begins with `ok` or `WRONG`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "tiny")
        prompts = [tuple(range(5, 5 + length)) for length in (3, 40, 90)]
        engine = Engine.load(model, num_blocks=64)
        expected = []
        for prompt in prompts:
            generation = Generation(engine, prompt, 0)
            generate(engine, [generation], NUM_TOKENS)
            expected.append(tuple(generation.output))
        node = (*options, "--kv-blocks", "64")
        async with start_cluster(
            model, folder, prefill=((*node, "--token-budget", "32"),), decode=((*node, "--block-size", "32"),)
        ) as cluster:
            wanted = Options(max_tokens=NUM_TOKENS, ignore_eos=True)
            found = [tuple((await cluster.answer(prompt, wanted)).token_ids) for prompt in prompts]
            await cluster.leak_oracle()
    return (
        f"{'ok' if found == expected else 'WRONG'}: prefill and decode processes on one device, {len(prompts)} prompts"
    )
