"""Draw a token from processed logits: Gumbel-max over the ids that the filters keep.

    z = (logits - max logit) / temperature;  keep = top_k, then top_p, then min_p;  token = argmax over kept i of z_i + g_i

with g_i the Gumbel noise of (seed, sequence, position, token id) from `philox`. The draw depends on nothing else: not on the
batch, not on earlier draws, and, unlike inverse-CDF sampling, hardly on tiny differences of the logits. z is float64 and never
above 0, so that no temperature above 0 overflows: a tiny one is greedy.

Filters have the order and the border cases of transformers' logits processors: ties with the k-th logit stay, and the most
likely id always stays. Two differ: sums are float64, where transformers' float32 may put an id to the other side of a border
that it touches within rounding; and of equal logits at the border of top-p the lower ids stay, where transformers leaves it to
its sort.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.core.work import Sampling
from pdserve.kernels.logits import IdArray, SampledRow
from pdserve.kernels.philox import MAX_NOISE, gumbel, gumbel_of_rows, uniform

FloatArray = NDArray[np.float32] | NDArray[np.float64]
Candidates = tuple[IdArray, NDArray[np.float64]]
"""Ids [n], ascending, and their z [n]."""

NUM_FAVOURITES = 256
"""Of more candidates than this, so many of the likeliest are drawn first, to learn what the others must beat."""
NUCLEUS_GUESS = 256
"""Ids that are sorted first to find the border of top-p; eight times as many while they do not reach it."""
FOLD = 64
SLACK = 1.001
"""Room for rounding when a candidate is ruled out by its uniform."""


def draw(scores: Sequence[NDArray[np.float32]], rows: Sequence[SampledRow]) -> list[int]:
    """Return the id drawn from each row's processed logits [vocabulary]; none is greedy, and each maximum is finite."""
    if not rows:
        return []
    candidates = [contenders(*keep(logits, row.sampling), row) for logits, row in zip(scores, rows, strict=True)]
    noise = gumbel_of_rows(
        [row.sampling.seed for row in rows],
        [row.position for row in rows],
        [row.sequence for row in rows],
        [ids for ids, _ in candidates],
    )
    return [int(ids[int(np.argmax(z + g))]) for (ids, z), g in zip(candidates, noise, strict=True)]


def keep(scores: NDArray[np.float32], sampling: Sampling) -> Candidates:
    """Return the ids [kept], ascending, that pass the filters, and their z [kept]; at least the most likely id."""
    least = float(np.finfo(np.float32).min)
    if sampling.top_k > 0:
        least = max(least, kth_largest(scores, sampling.top_k))
    ids = np.flatnonzero(scores >= least)
    z = (scores[ids].astype(np.float64) - float(scores.max())) / sampling.temperature
    if sampling.top_p < 1.0:
        chosen = _nucleus(z, sampling.top_p)
        ids, z = ids[chosen], z[chosen]
    if sampling.min_p > 0.0:
        chosen = np.flatnonzero(z >= np.log(sampling.min_p))
        ids, z = ids[chosen], z[chosen]
    return ids, z


def contenders(ids: IdArray, z: NDArray[np.float64], row: SampledRow) -> Candidates:
    """Return those of the candidates `ids` [n] with scores `z` [n] that may win the draw, in the same order.

    What the likeliest ones reach with their noise is a bound. Who would need more than the largest noise to reach it is out
    unseen; of the others the uniform is enough: g >= t means u <= 1 - exp(-exp(-t)), which is at most exp(-t).
    """
    if ids.shape[0] <= NUM_FAVOURITES:
        return ids, z
    favourites = np.flatnonzero(z >= kth_largest(z, NUM_FAVOURITES))
    bound = float((z[favourites] + gumbel(row.sampling.seed, ids[favourites], row.position, row.sequence)).max())
    possible = np.flatnonzero(z >= bound - MAX_NOISE)
    u = uniform(row.sampling.seed, ids[possible], row.position, row.sequence)
    needed = np.exp((z[possible] - bound).astype(np.float32)) * np.float32(SLACK) + np.float32(2.0**-31)
    left = possible[u <= needed]
    return ids[left], z[left]


def kth_largest(values: FloatArray, k: int) -> float:
    """Return the k-th largest of `values` [n]; the smallest if there are fewer.

    The k-th largest of the maxima of n / 64 groups is a lower bound, above which few values lie.
    """
    width = values.shape[0] // FOLD
    if k < width:
        maxima = values[: width * FOLD].reshape(FOLD, width).max(axis=0)
        values = values[values >= np.partition(maxima, width - k)[width - k]]
    place = max(values.shape[0] - k, 0)
    return float(np.partition(values, place)[place])


def _nucleus(z: NDArray[np.float64], top_p: float) -> IdArray:
    """Return the places [kept], ascending, of the smallest set whose probability reaches `top_p`: softmax over z [n]."""
    goal = top_p * float(np.exp(z).sum())
    guess = NUCLEUS_GUESS
    while True:
        likeliest = np.flatnonzero(z >= kth_largest(z, guess)) if guess < z.shape[0] else np.arange(z.shape[0])
        order = likeliest[np.argsort(-z[likeliest], kind="stable")]
        reached = np.cumsum(np.exp(z[order]))
        if reached[-1] >= goal or order.shape[0] == z.shape[0]:
            break
        guess *= 8
    # An id stays while those before it have not reached the goal.
    return np.sort(order[: 1 + int(np.searchsorted(reached, goal))])
