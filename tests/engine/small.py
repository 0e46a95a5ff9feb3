"""Small engines for tests: a random model with windows and grouped heads, and what is done with it again and again."""

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from pdserve.core.layout import num_blocks_for
from pdserve.core.work import Sampling
from pdserve.engine.batch import Choice, Chosen, SequenceChunk, StepResult
from pdserve.engine.engine import Engine
from pdserve.engine.loading import LoadedModel
from pdserve.kernels.logits import SampledRow
from tests.architectures.tiny import ARCHITECTURES, build

GREEDY = Sampling()
GREEDY_ROW = (SampledRow(GREEDY, 0, 0),)


@cache
def model_of(model_type: str, backend: str | None = None) -> LoadedModel:
    """Return a model; one for each backend, since engines put other layers into it."""
    return build(next(tiny for tiny in ARCHITECTURES if tiny.model_type == model_type), seed=0)


def small_engine(
    model_type: str = "qwen3", *, block_size: int = 4, num_blocks: int = 40, backend: str | None = None
) -> Engine:
    """Return an engine whose layers 0 and 2 have a window of 6 tokens (qwen3) or none (llama)."""
    return Engine(
        model_of(model_type, backend),
        dtype="float32",
        device="cpu",
        block_size=block_size,
        num_blocks=num_blocks,
        attention_backend=backend,
    )


def prompt_of(length: int, number: int = 0) -> tuple[int, ...]:
    return tuple((5 + 31 * number + 13 * index + index * index) % 199 for index in range(length))


class Generation:
    """One sequence on an engine, step by step."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        first_block: int,
        sampling: Sampling = GREEDY,
        output: Sequence[int] = (),
    ) -> None:
        self.prompt = tuple(prompt)
        self.output = list(output)
        self.sampling = sampling
        self.num_computed = 0
        size = num_blocks_for(engine.max_model_len, engine.block_size)
        self.block_ids = list(range(first_block, min(first_block + size, engine.num_blocks)))

    def next_chunk(self, budget: int = 1 << 30) -> SequenceChunk:
        """Return the next tokens to compute, at most `budget`; the last chunk of what is known asks for a token."""
        known = (*self.prompt, *self.output)
        start, stop = self.num_computed, min(len(known), self.num_computed + budget)
        self.num_computed = stop
        samples = (SampledRow(self.sampling, 0, len(self.output)),) if stop == len(known) else ()
        return SequenceChunk(known[start:stop], start, self.block_ids, samples)

    def accept(self, choice: Choice | None) -> None:
        if choice is not None:
            assert isinstance(choice, Chosen), choice.reason
            self.output.append(choice.token_id)


def first_choices(result: StepResult) -> list[Choice | None]:
    """Return what each chunk's first sampled row got, or None for a chunk that sampled none."""
    return [chunk.choices[0] if chunk.choices else None for chunk in result.chunks]


def generate(engine: Engine, generations: Sequence[Generation], num_tokens: int, budget: int = 1 << 30) -> None:
    """Step all together until each has `num_tokens` of output."""
    while pending := [generation for generation in generations if len(generation.output) < num_tokens]:
        result = engine.step([generation.next_chunk(budget) for generation in pending])
        for generation, choice in zip(pending, first_choices(result), strict=True):
            generation.accept(choice)


def prompt_logits(engine: Engine, prompt: tuple[int, ...], budget: int, first_block: int = 0) -> Tensor:
    """Return the logits after a prompt computed alone in chunks of `budget`, [vocabulary]."""
    generation = Generation(engine, prompt, first_block)
    while generation.num_computed < len(prompt):
        logits = engine.logits([generation.next_chunk(budget)])
    return logits[0]
