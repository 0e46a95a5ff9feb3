"""Whether a fast forward pass computes what the unmodified `transformers` module computes: compared on random tokens, at load.

Two steps are compared: two chunks of prompts, then one of them going on beside another chunk. Both go through pools of their own.
"""

import math
import random

import torch

from pdserve.core.layout import KvLayout
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.forward import Forward
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.native_model import NativeForward

BLOCK_SIZE = 16
NUM_BLOCKS = 7
LENGTHS = (37, 21, 30)
"""Tokens of the three prompts. They pass block borders, and windows of models made for tests."""
BOUNDS = {"float32": 2e-4, "bfloat16": 0.2, "float16": 0.02}
"""Largest difference of a logit, as a share of the largest logit. Below fp32 the module itself rounds every activation."""


def largest_difference(slow: Forward, fast: NativeForward, vocab_size: int) -> float:
    """Return the largest difference between logits of both, as a share of the largest one; infinite where one is NaN.

    Both were made on pools of `pool_like`.
    """
    draw = random.Random(7)  # noqa: S311 - tokens of a comparison that is the same each time
    prompts = [tuple(draw.randrange(vocab_size) for _ in range(length)) for length in LENGTHS]
    more = tuple(draw.randrange(vocab_size) for _ in range(2))
    tables = [[3, 0, 5], [1, 4], [2, 6]]
    first = [SequenceChunk(prompts[index], 0, tables[index]) for index in (0, 1)]
    second = [
        SequenceChunk(more[:1], LENGTHS[0], tables[0]),
        SequenceChunk(prompts[2], 0, tables[2]),
        SequenceChunk(more[1:], LENGTHS[1], tables[1]),
    ]
    worst = 0.0
    for chunks in (first, second):
        kept = [range(len(chunk.token_ids)) for chunk in chunks]
        expected, found = slow.logits(chunks, kept).float(), fast.logits(chunks, kept)
        share = float((expected - found).abs().max() / expected.abs().max())
        worst = float("inf") if math.isnan(share) else max(worst, share)
    return worst


def pool_like(layout: KvLayout) -> KvPool:
    """Return a small pool for a comparison."""
    return KvPool(layout, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"))
