"""SmolLM2 on pages gives the goldens: each prompt alone in chunks, and sixteen at a time in mixed steps."""

from collections.abc import Iterator, Sequence

import pytest

from pdserve.core.layout import num_blocks_for
from pdserve.engine.batch import Chosen, SequenceChunk
from pdserve.engine.blocks import BlockLease, BlockPool
from pdserve.engine.engine import Engine
from tests.engine.small import GREEDY_ROW, first_choices
from tests.goldens.goldens import LOGPROB_TOLERANCE, MAX_NEW_TOKENS, Golden, load_goldens
from tests.goldens.model import default_model_dir

pytestmark = pytest.mark.smollm2

NUM_BLOCKS = 400
CHUNK_BUDGET = 128


class Serving:
    """One golden on its way through the engine."""

    def __init__(self, golden: Golden, lease: BlockLease) -> None:
        self.golden = golden
        self.lease = lease
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self._num_computed = 0

    def next_chunk(self, budget: int) -> SequenceChunk:
        known = (*self.golden.prompt_ids, *self.tokens)
        start, stop = self._num_computed, min(len(known), self._num_computed + budget)
        self._num_computed = stop
        return SequenceChunk(known[start:stop], start, self.lease.block_ids, GREEDY_ROW if stop == len(known) else ())

    def accept(self, choice: Chosen) -> None:
        self.tokens.append(choice.token_id)
        self.logprobs.append(choice.logprob)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == len(self.golden.tokens)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(default_model_dir(), threads=1, block_size=16, num_blocks=NUM_BLOCKS)


@pytest.fixture
def pool(engine: Engine) -> Iterator[BlockPool]:
    pool = BlockPool(NUM_BLOCKS, on_free=engine.poison)
    pool.lease(NUM_BLOCKS, "poison").release()
    yield pool
    pool.check_invariants()
    assert pool.num_free == NUM_BLOCKS


def serve(engine: Engine, pool: BlockPool, goldens: Sequence[Golden], most_at_once: int) -> None:
    """Serve all, up to `most_at_once` together: chunks of several prompts and decode rows share each step's budget."""
    waiting, running = list(goldens), list[Serving]()
    while waiting or running:
        while waiting and len(running) < most_at_once:
            golden = waiting.pop(0)
            size = num_blocks_for(len(golden.prompt_ids) + MAX_NEW_TOKENS, engine.block_size)
            running.append(Serving(golden, pool.lease(size, golden.name)))
        share = max(1, CHUNK_BUDGET // len(running))
        result = engine.step([serving.next_chunk(share) for serving in running])
        for serving, choice in zip(list(running), first_choices(result), strict=True):
            if choice is not None:
                assert isinstance(choice, Chosen), choice.reason
                serving.accept(choice)
            if serving.is_done:
                assert tuple(serving.tokens) == serving.golden.tokens, serving.golden.name
                assert serving.logprobs == pytest.approx(serving.golden.logprobs, abs=LOGPROB_TOLERANCE), (
                    serving.golden.name
                )
                serving.lease.release()
                running.remove(serving)


@pytest.mark.deep
def test_one_at_a_time(engine: Engine, pool: BlockPool) -> None:
    """Every third alone, of 1 token, just over a block, and texts: all of them take a minute and a half, and are served below."""
    serve(engine, pool, load_goldens().goldens[::3], most_at_once=1)


def test_sixteen_at_once(engine: Engine, pool: BlockPool) -> None:
    before = engine.num_forwards
    goldens = sorted(load_goldens().goldens, key=lambda golden: len(golden.prompt_ids))
    serve(engine, pool, goldens, most_at_once=16)
    # The 3,000-token prompt alone takes hundreds of shares; all the others together come to about a hundred steps.
    assert engine.num_forwards - before < 700


def test_identity_names_this_model(engine: Engine) -> None:
    assert engine.identity.weight_digest == load_goldens().weight_digest
    assert engine.eos_token_ids == {2}
