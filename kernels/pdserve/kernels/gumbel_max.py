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
from pdserve.kernels.philox import MAX_NOISE, gumbel_of_rows, uniform

Candidates = tuple[IdArray, NDArray[np.float64]]
"""Ids [n], ascending, and their z [n]."""

NUM_FAVOURITES = 256
"""Of more candidates than this, so many of the likeliest are drawn first, to learn what the others must beat."""
NUCLEUS_GUESS = 256
"""Logits that are sorted first to find the border of top-p; sixteen times as many while they do not reach it."""
FOLD = 64
BLOCK = 8192
"""Ids at a time where all are looked at: larger arrays would come fresh from the system each time."""
LOWEST = float(np.finfo(np.float32).min)
"""Below it only what is forbidden."""
SLACK = 1.001
"""Room for rounding when a candidate is ruled out by its uniform."""


def draw(scores: Sequence[NDArray[np.float32]], rows: Sequence[SampledRow]) -> list[int]:
    """Return the id drawn from each row's processed logits [vocabulary]; none is greedy, and each maximum is finite."""
    candidates = [favourites(logits, row.sampling) for logits, row in zip(scores, rows, strict=True)]
    noise = _noise(rows, candidates)
    open_rows = [index for index, (ids, _) in enumerate(candidates) if ids.shape[0] >= NUM_FAVOURITES]
    for index in open_rows:
        bound = float((candidates[index][1] + noise[index]).max())
        candidates[index] = contenders(scores[index], rows[index], bound)
    their_noise = _noise([rows[index] for index in open_rows], [candidates[index] for index in open_rows])
    for index, g in zip(open_rows, their_noise, strict=True):
        noise[index] = g
    return [int(ids[int(np.argmax(z + g))]) for (ids, z), g in zip(candidates, noise, strict=True)]


def favourites(scores: NDArray[np.float32], sampling: Sampling) -> Candidates:
    """Return the likeliest of the ids that the filters keep; all that they keep if those are fewer than NUM_FAVOURITES."""
    has_few = 0 < sampling.top_k <= NUM_FAVOURITES
    return keep(scores, sampling, LOWEST if has_few else kth_largest(scores, NUM_FAVOURITES))


def contenders(scores: NDArray[np.float32], row: SampledRow, bound: float) -> Candidates:
    """Return those of the ids that the filters keep which may win the draw, where one is known to reach `bound` with its noise.

    Who would need more than the largest noise to reach it is out unseen; of the others the uniform is enough: g >= t means
    u <= 1 - exp(-exp(-t)), which is at most exp(-t).
    """
    sampling = row.sampling
    needed = float(scores.max()) + sampling.temperature * (bound - MAX_NOISE)
    ids, z = keep(scores, sampling, float(np.nextafter(np.float32(needed), np.float32(-np.inf))))
    u = uniform(sampling.seed, ids, row.position, row.sequence)
    largest = np.exp((z - bound).astype(np.float32)) * np.float32(SLACK) + np.float32(2.0**-31)
    left = np.flatnonzero(u <= largest)
    return ids[left], z[left]


def _noise(rows: Sequence[SampledRow], candidates: Sequence[Candidates]) -> list[NDArray[np.float64]]:
    """Return the Gumbel noise of each row's candidates."""
    return gumbel_of_rows(
        [row.sampling.seed for row in rows],
        [row.position for row in rows],
        [row.sequence for row in rows],
        [ids for ids, _ in candidates],
    )


def keep(
    scores: NDArray[np.float32], sampling: Sampling, least: float = LOWEST, weight: float | None = None
) -> Candidates:
    """Return the ids that pass the filters and whose logit is at least `least`; without it, at least the most likely id.

    `scores` [vocabulary]: processed logits, their maximum finite. `weight`: the sum of exp(z) of which top-p is a share, where
    `scores` are only some of them.
    """
    best = float(scores.max())
    border = kth_largest(scores, sampling.top_k) if sampling.top_k > 0 else LOWEST
    if sampling.top_p < 1.0:
        ids = _nucleus(scores, max(border, LOWEST), sampling, weight)
        ids = ids[scores[ids] >= least]
    else:
        ids = np.flatnonzero(scores >= max(border, least, LOWEST))
    z = _z(scores[ids], best, sampling.temperature)
    if sampling.min_p > 0.0:
        chosen = np.flatnonzero(z >= np.log(sampling.min_p))
        ids, z = ids[chosen], z[chosen]
    return ids, z


def _nucleus(scores: NDArray[np.float32], border: float, sampling: Sampling, weight: float | None) -> IdArray:
    """Return the smallest set of ids, ascending, whose probability among those with logits from `border` on reaches top_p."""
    best = float(scores.max())
    goal = sampling.top_p * (_weight(scores, border, best, sampling.temperature) if weight is None else weight)
    guess = NUCLEUS_GUESS
    while True:
        least = kth_largest(scores, guess) if border == LOWEST else border
        values = np.sort(scores[scores >= max(least, LOWEST)])[::-1]
        reached = np.cumsum(np.exp(_z(values, best, sampling.temperature)))
        # An id stays while those before it have not reached the goal.
        num_kept = min(1 + int(np.searchsorted(reached, goal)), values.shape[0])
        if num_kept < values.shape[0] or least <= border or values.shape[0] == scores.shape[0]:
            break
        guess *= 16
    above = np.flatnonzero(scores > values[num_kept - 1])
    equal = np.flatnonzero(scores == values[num_kept - 1])[: num_kept - above.shape[0]]
    return np.sort(np.concatenate((above, equal)))


def _weight(scores: NDArray[np.float32], border: float, best: float, temperature: float) -> float:
    """Return the sum of exp(z) over the logits from `border` on."""
    if border > LOWEST:
        return float(np.exp(_z(scores[scores >= border], best, temperature)).sum())
    parts = (scores[start : start + BLOCK] for start in range(0, scores.shape[0], BLOCK))
    return sum(float(np.exp(_z(part, best, temperature)).sum()) for part in parts)


def _z(scores: NDArray[np.float32], best: float, temperature: float) -> NDArray[np.float64]:
    return (scores.astype(np.float64) - best) / temperature


def kth_largest(values: NDArray[np.float32], k: int) -> float:
    """Return the k-th largest of `values` [n]; the smallest if there are fewer.

    The k-th largest of the maxima of n / 64 groups is a lower bound, above which few values lie; where most is forbidden, what
    is not.
    """
    num_values, width = values.shape[0], values.shape[0] // FOLD
    bound = -np.inf
    if k < width:
        maxima = values[: width * FOLD].reshape(FOLD, width).max(axis=0)
        bound = float(np.partition(maxima, width - k)[width - k])
    candidates = values[values >= max(bound, LOWEST)]
    if candidates.shape[0] < min(k, num_values):
        return -np.inf
    place = max(candidates.shape[0] - k, 0)
    return float(np.partition(candidates, place)[place])
