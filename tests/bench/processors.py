"""What choosing the tokens adds to a decode step of the engine: greedy, with some parameters, and with all of them.

`python -m tests.bench.processors` prints one JSON record. Choices are measured in turn, each after a forward, as CPU time of the
one engine thread, which neighbours disturb least; every choice is of all rows of the step, each with its own sequence. The logits
are those after real text, and after nonsense, whose distribution is so flat that nearly every id might be chosen.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from pdserve.core.models import DEFAULT_MODEL, resolve_model_dir
from pdserve.core.work import Sampling
from pdserve.engine.batch import Chosen, SequenceChunk
from pdserve.engine.engine import Engine
from pdserve.kernels.logits import MaskArray, RowState, SampledRow
from pdserve.kernels.sampling import sample
from tests.bench.machine import describe_machine, quantile
from tests.goldens.goldens import load_goldens

BATCH = 32
CONTEXT = 256
NUM_OUTPUTS = 64
REPEATS = 9
BLOCKS_EACH = CONTEXT // 16 + 1
GREEDY_ROW = SampledRow(Sampling(), 0, 0)
END_IDS = frozenset({2})
PENALTIES = Sampling(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
ALL = Sampling(
    temperature=0.9,
    top_k=50,
    top_p=0.95,
    min_p=0.02,
    seed=7,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias=tuple((100 + 7 * n, (-1) ** n * 0.5) for n in range(300)),
    allowed_token_ids=frozenset(range(0, 49152, 12)),
    banned_token_ids=frozenset(range(5, 20_000, 20)),
    banned_sequences=tuple((900 + n, 1200 + n) for n in range(256)),
)
CASES = {
    "greedy": Sampling(),
    "temperature 1": Sampling(temperature=1.0, seed=7),
    "temperature 0.7": Sampling(temperature=0.7, seed=7),
    "top_k 50": Sampling(temperature=1.0, top_k=50, seed=7),
    "top_p 0.95": Sampling(temperature=1.0, top_p=0.95, seed=7),
    "min_p 0.05": Sampling(temperature=1.0, min_p=0.05, seed=7),
    "penalties": PENALTIES,
    "top_p 0.9 at temperature 0.7": Sampling(temperature=0.7, top_p=0.9, seed=7),
    "all": ALL,
}
"""What every row of the step asks for; with `all` also a mask of a grammar, `min_tokens` and 20 alternatives."""


class HalfAllowed:
    """A matcher that costs nothing itself: what a grammar's own library takes is not measured here."""

    def accept(self, token_id: int) -> None:
        """Any token is fine."""

    def fill(self, mask: MaskArray) -> None:
        """Allow every other id."""
        mask[:] = 0x55555555


def processors_cost() -> dict[str, object]:
    """Measure; ratios are of medians."""
    engine = Engine.load(
        resolve_model_dir(DEFAULT_MODEL), dtype="float32", threads=1, block_size=16, num_blocks=2 * BATCH * BLOCKS_EACH
    )
    nonsense = [tuple((7 * i + n) % 40_000 + 100 for i in range(CONTEXT)) for n in range(BATCH)]
    chunks = _decode_step(engine, nonsense)
    texts = _texts()
    works: dict[str, Callable[[], object]] = {}
    for source, prompts, logits in (
        ("text", texts, _logits_after(engine, texts)),
        ("nonsense", nonsense, engine.logits(chunks)),
    ):
        for name, sampling in CASES.items():
            rows = [_row(sampling, prompt, n, is_full=name == "all") for n, prompt in enumerate(prompts)]
            works[f"{source}: {name}"] = partial(sample, logits, rows)
    forward_ms, costs = _median_ms(lambda: engine.logits(chunks), works)  # it writes the same positions each time
    return {
        "batch": BATCH,
        "vocabulary": engine.vocab_size,
        "forward_ms": round(forward_ms, 1),
        "choice_ms": {name: round(cost, 2) for name, cost in costs.items()},
        "choice_share_of_forward": {name: round(cost / forward_ms, 3) for name, cost in costs.items()},
        "all_processors_add": round(
            (costs["text: all"] - costs["text: greedy"]) / (forward_ms + costs["text: greedy"]), 3
        ),
    }


def _decode_step(engine: Engine, prompts: list[tuple[int, ...]]) -> list[SequenceChunk]:
    """Return the chunks of a step of one token behind each prompt."""
    chunks = []
    for n, prompt in enumerate(prompts):
        block_ids = range(n * BLOCKS_EACH, (n + 1) * BLOCKS_EACH)
        [[choice]] = [
            result.choices for result in engine.step([SequenceChunk(prompt, 0, block_ids, (GREEDY_ROW,))]).chunks
        ]
        assert isinstance(choice, Chosen)
        chunks.append(SequenceChunk((choice.token_id,), CONTEXT, block_ids, (GREEDY_ROW,)))
    return chunks


def _texts() -> list[tuple[int, ...]]:
    """Return beginnings of the goldens' prompts with their answers, as many as rows."""
    whole = [golden.prompt_ids + golden.tokens for golden in load_goldens().goldens]
    return [whole[n % len(whole)][: 40 + 3 * n] for n in range(BATCH)]


def _logits_after(engine: Engine, texts: list[tuple[int, ...]]) -> Tensor:
    # The blocks behind those of the decode step's contexts are not touched.
    blocks = range(engine.num_blocks - BATCH * BLOCKS_EACH, engine.num_blocks)
    return torch.cat([engine.logits([SequenceChunk(text, 0, blocks, (GREEDY_ROW,))]) for text in texts])


def _row(sampling: Sampling, prompt: tuple[int, ...], number: int, *, is_full: bool) -> SampledRow:
    outputs = [(11 * i + 31 * number) % 3000 for i in range(NUM_OUTPUTS)]
    if not is_full:
        return SampledRow(sampling, number, NUM_OUTPUTS, state=RowState(sampling, prompt, outputs))
    state = RowState(sampling, prompt, outputs, END_IDS, NUM_OUTPUTS + 1, HalfAllowed())
    return SampledRow(sampling, number, NUM_OUTPUTS, 20, state)


@torch.inference_mode()
def _median_ms(
    forward: Callable[[], object], choices: Mapping[str, Callable[[], object]]
) -> tuple[float, dict[str, float]]:
    """Measure each choice right after a forward, as it comes in a step, all in turn again and again; return the medians."""
    forwards, times = list[float](), {name: list[float]() for name in choices}
    for _ in range(REPEATS):
        for name, choice in choices.items():
            forwards.append(_cpu_ms(forward))
            times[name].append(_cpu_ms(choice))
    return quantile(forwards, 0.5), {name: quantile(taken, 0.5) for name, taken in times.items()}


def _cpu_ms(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return 1000 * (time.thread_time() - began_s)


def main() -> None:
    """Print machine, versions and costs."""
    print(json.dumps({"machine": describe_machine(), "processors": processors_cost()}, indent=2))  # noqa: T201 - the record


if __name__ == "__main__":
    main()
