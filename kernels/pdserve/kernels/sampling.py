"""Choose the next token of each sampled row, after `processors` had their say.

Greedy: argmax of the processed logits. Otherwise Gumbel-max over the ids that the filters keep:

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
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.work import Sampling, TopLogprobs
from pdserve.kernels.logits import Choice, Chosen, IdArray, RowFailed, SampledRow
from pdserve.kernels.philox import MAX_NOISE, gumbel, uniform
from pdserve.kernels.processors import process

FloatArray = NDArray[np.float32] | NDArray[np.float64]

BROKEN_LOGITS = RowFailed("the model's logits hold NaN or infinity")
NOTHING_ALLOWED = RowFailed("no token is allowed: grammar, allowed, banned and ending tokens together leave none")
OVERFLOW = RowFailed("biases and penalties together make a logit infinite")

NUM_FAVOURITES = 256
"""Of more candidates than this, so many of the likeliest are drawn first, to learn what the others must beat."""
NUCLEUS_GUESS = 256
"""Ids that are sorted first to find the border of top-p; eight times as many while they do not reach it."""
FOLD = 64
SLACK = 1.001
"""Room for rounding when a candidate is ruled out by its uniform."""


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> list[Choice]:
    """Return what each row of `logits` [rows, vocabulary] gets; log-probabilities are of the unmodified distribution.

    A row fails by itself where its logits define no distribution (one is NaN or positive infinity, or all are negative
    infinity), where its processors leave nothing, or where its matcher fails. Raises ValueError if the numbers of rows differ;
    never for what one row holds, since its neighbours have no part in that.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
    if not rows:
        return []
    raw = logits.float()
    norms = torch.logsumexp(raw, dim=-1)
    is_sound = torch.isfinite(norms).tolist()
    states = {index: row.state for index, row in enumerate(rows) if row.state is not None and is_sound[index]}
    scores = raw.clone() if states else raw
    reasons = process(scores, states)
    picks = [
        RowFailed(reasons[index]) if index in reasons else pick if is_sound[index] else BROKEN_LOGITS
        for index, pick in enumerate(_pick(scores, rows, is_sound))
    ]
    return _with_logprobs(raw, norms, rows, picks)


def log_probabilities(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[tuple[float, TopLogprobs]]:
    """Return of each row of `logits` [rows, vocabulary] the natural log-probability of its token, and the most likely ones.

    NaN where the logits are broken.
    """
    raw = logits.float()
    norms = torch.logsumexp(raw, dim=-1)
    chosen = raw.gather(1, torch.tensor(token_ids, device=raw.device)[:, None])[:, 0] - norms
    tops = _tops(raw, norms, num_top) if num_top else [()] * len(token_ids)
    return list(zip(chosen.tolist(), tops, strict=True))


def draw(scores: NDArray[np.float32], row: SampledRow) -> int:
    """Return the id drawn from processed logits `scores` [vocabulary] for a row that is not greedy; their maximum is finite."""
    ids, z = keep(scores, row.sampling)
    if ids.shape[0] > NUM_FAVOURITES:
        ids, z = contenders(ids, z, row)
    return int(ids[int(np.argmax(z + _noise(row, ids)))])


def keep(scores: NDArray[np.float32], sampling: Sampling) -> tuple[IdArray, NDArray[np.float64]]:
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


def contenders(ids: IdArray, z: NDArray[np.float64], row: SampledRow) -> tuple[IdArray, NDArray[np.float64]]:
    """Return those of the candidates `ids` [n] with scores `z` [n] that may win the draw, in the same order.

    What the likeliest ones reach with their noise is a bound. Who would need more than the largest noise to reach it is out
    unseen; of the others the uniform is enough: g >= t means u <= 1 - exp(-exp(-t)), which is at most exp(-t).
    """
    favourites = np.flatnonzero(z >= kth_largest(z, NUM_FAVOURITES))
    bound = float((z[favourites] + _noise(row, ids[favourites])).max())
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


def _noise(row: SampledRow, ids: IdArray) -> NDArray[np.float64]:
    return gumbel(row.sampling.seed, ids, row.position, row.sequence)


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


def _pick(scores: Tensor, rows: Sequence[SampledRow], is_sound: Sequence[bool]) -> list[int | RowFailed]:
    """Return a token per row of processed logits, or why there is none; anything for a row that is not sound."""
    best = scores.amax(dim=-1).tolist()
    picks: list[int | RowFailed] = list(scores.argmax(dim=-1).tolist())
    host = scores.cpu().numpy() if any(not row.sampling.is_greedy for row in rows) else None
    for index, row in enumerate(rows):
        if best[index] == -np.inf:
            picks[index] = NOTHING_ALLOWED
        elif best[index] == np.inf:
            picks[index] = OVERFLOW
        elif host is not None and is_sound[index] and not row.sampling.is_greedy:
            picks[index] = draw(host[index], row)
    return picks


def _with_logprobs(
    raw: Tensor, norms: Tensor, rows: Sequence[SampledRow], picks: Sequence[int | RowFailed]
) -> list[Choice]:
    token_ids = torch.tensor([0 if isinstance(pick, RowFailed) else pick for pick in picks], device=raw.device)
    logprobs = (raw.gather(1, token_ids[:, None])[:, 0] - norms).tolist()
    asking = [index for index, row in enumerate(rows) if row.num_top]
    most = max((row.num_top for row in rows), default=0)
    tops = dict(zip(asking, _tops(raw[asking], norms[asking], most), strict=True)) if asking else {}
    return [
        pick if isinstance(pick, RowFailed) else Chosen(pick, logprobs[index], tops.get(index, ())[: row.num_top])
        for index, (row, pick) in enumerate(zip(rows, picks, strict=True))
    ]


def _tops(raw: Tensor, norms: Tensor, num_top: int) -> list[TopLogprobs]:
    values, ids = torch.topk(raw, min(num_top, raw.shape[-1]), dim=-1)
    logprobs = (values - norms[:, None]).tolist()
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logprobs, strict=True)]
