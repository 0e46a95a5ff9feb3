"""A reference's prompts computed by two engines: one prefills in mixed chunks, one decodes, the KV goes between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pdserve.core.layout import num_blocks_for
from pdserve.core.work import Sampling
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.blocks import BlockLease, BlockPool
from pdserve.engine.engine import Engine
from pdserve.engine.loading import LoadedModel
from pdserve.kernels.logits import SampledRow
from tests.architectures.handover import Corridor
from tests.architectures.reference import NUM_NEW_TOKENS, Reference

PREFILL_BLOCK_SIZE = 4
DECODE_BLOCK_SIZE = 7
CHUNK_TOKENS = 4
NUM_BLOCKS = 40
GREEDY_ROW = (SampledRow(Sampling(), 0, 0),)
TOLERANCE = 1e-3


@dataclass
class Side:
    """One engine with the books of its blocks, and a lease per prompt."""

    engine: Engine
    pool: BlockPool
    leases: list[BlockLease]


def run(model: LoadedModel, reference: Reference, backend: str | None) -> tuple[list[list[int]], list[Tensor]]:
    """Return tokens and logits per prompt, as `Reference` holds them."""
    prefill = _side(model, PREFILL_BLOCK_SIZE, reference, backend)
    decode = _side(model, DECODE_BLOCK_SIZE, reference, backend)
    with Corridor(reference.prompts, (prefill.engine, prefill.leases), (decode.engine, decode.leases)) as corridor:
        rows = _prefill(prefill, reference.prompts, corridor)
        tokens = [[int(row.argmax())] for row in rows]
        corridor.finish([first[0] for first in tokens])
    for lease in prefill.leases:
        lease.release()  # before decoding: its blocks now hold NaN, and nothing may depend on them
    logits = [[row] for row in rows]
    _decode(decode, reference.prompts, tokens, logits)
    for lease in decode.leases:
        lease.release()
    for side in (prefill, decode):
        side.pool.check_invariants()
        assert side.pool.num_free == NUM_BLOCKS
    return tokens, [torch.stack(rows) for rows in logits]


def disagreement(model: LoadedModel, reference: Reference, backend: str | None = None) -> str | None:
    """Return how engines of a backend, or of the best one here, differ from the reference.

    None if tokens are equal and logits within `TOLERANCE`.
    """
    tokens, logits = run(model, reference, backend)
    for index, expected in enumerate(reference.tokens):
        for step in range(NUM_NEW_TOKENS):
            distance = float((logits[index][step] - reference.logits[index][step]).abs().max())
            if not distance <= TOLERANCE:
                return f"prompt {index}, token {step}: logits differ by {distance:.4g}"
            if tokens[index][step] != expected[step]:
                return f"prompt {index}, token {step}: {tokens[index][step]} instead of {expected[step]}"
    return None


def _side(model: LoadedModel, block_size: int, reference: Reference, backend: str | None) -> Side:
    engine = Engine(
        model,
        dtype="float32",
        device="cpu",
        block_size=block_size,
        num_blocks=NUM_BLOCKS,
        attention_backend=backend,
    )
    pool = BlockPool(NUM_BLOCKS, on_free=engine.poison)
    # Blocks taken and freed first: they now hold NaN, and come back in another order.
    pool.lease(NUM_BLOCKS, "poison").release()
    sizes = [num_blocks_for(len(prompt) + NUM_NEW_TOKENS, block_size) for prompt in reference.prompts]
    leases = [pool.lease(0, f"prompt {index}") for index in range(len(sizes))]
    for _ in range(max(sizes)):
        for lease, size in zip(leases, sizes, strict=True):
            if len(lease.block_ids) < size:
                lease.extend(1)  # one in turn, so that no sequence has consecutive blocks
    return Side(engine, pool, leases)


def _prefill(side: Side, prompts: Sequence[tuple[int, ...]], corridor: Corridor) -> list[Tensor]:
    """Compute all prompts in chunks, several prompts per step, sending layer by layer; return the logits after each."""
    done = [0] * len(prompts)
    rows: list[Tensor | None] = [None] * len(prompts)
    while any(row is None for row in rows):
        spans = {
            index: range(done[index], min(len(prompt), done[index] + CHUNK_TOKENS))
            for index, prompt in enumerate(prompts)
            if done[index] < len(prompt)
        }
        chunks = [
            SequenceChunk(
                prompts[index][span.start : span.stop],
                span.start,
                side.leases[index].block_ids,
                GREEDY_ROW if span.stop == len(prompts[index]) else (),
            )
            for index, span in spans.items()
        ]
        answers = iter(_one_forward(side.engine, chunks, partial(_report, corridor, spans)))
        for index, span in spans.items():
            done[index] = span.stop
            if span.stop == len(prompts[index]):
                rows[index] = next(answers)
    return [row for row in rows if row is not None]


def _report(corridor: Corridor, spans: dict[int, range], layer: int) -> None:
    for index, span in spans.items():
        corridor.computed(index, layer, span)


def _decode(
    side: Side, prompts: Sequence[tuple[int, ...]], tokens: list[list[int]], logits: list[list[Tensor]]
) -> None:
    for _ in range(NUM_NEW_TOKENS - 1):
        chunks = [
            SequenceChunk(
                (tokens[index][-1],), len(prompt) + len(tokens[index]) - 1, side.leases[index].block_ids, GREEDY_ROW
            )
            for index, prompt in enumerate(prompts)
        ]
        for index, row in enumerate(_one_forward(side.engine, chunks)):
            logits[index].append(row)
            tokens[index].append(int(row.argmax()))


def _one_forward(
    engine: Engine, chunks: list[SequenceChunk], report: Callable[[int], None] | None = None
) -> list[Tensor]:
    """Run a step; the layers must be reported as written in order, each once, in one forward."""
    before, written = engine.num_forwards, list[int]()

    def on_layer(layer: int) -> None:
        written.append(layer)
        if report is not None:
            report(layer)

    rows = engine.logits(chunks, on_layer)
    assert engine.num_forwards == before + 1
    assert written == list(range(engine.layout.num_layers))
    return list(rows)
