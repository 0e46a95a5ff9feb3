"""Choose the next token of each sampled row.

Greedy: argmax of the logits. Otherwise Gumbel-max over the ids that the filters keep:

    z = (logits - max logit) / temperature;  keep = top_k, then top_p, then min_p;  token = argmax over kept i of z_i + g_i

with g_i the Gumbel noise of (seed, sequence, position, token id) from `philox`. The draw depends on nothing else: not on the
batch, not on earlier draws, and, unlike inverse-CDF sampling, hardly on tiny differences of the logits. z is float64 and never
above 0, so that no temperature above 0 overflows: a tiny one is greedy. Filters follow the order and the border cases of
transformers' logits processors: ties with the k-th logit stay, and the most likely id always stays.
"""

import numpy as np
import torch
from torch import Tensor

from pdserve.core.work import Sampling
from pdserve.kernels.logits import SampledRow
from pdserve.kernels.philox import gumbel


def sample(logits: Tensor, rows: list[SampledRow]) -> list[tuple[int, float] | None]:
    """Return (token id, natural log-probability under the unmodified distribution) per row of `logits` [rows, vocabulary].

    None for a row whose logits define no distribution: one is NaN or positive infinity, or all are negative infinity. Raises
    ValueError if the numbers of rows differ; never for what one row holds, since its neighbours have no part in that.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
    if not rows:
        return []
    scores = logits.float()
    norms = torch.logsumexp(scores, dim=-1)
    is_sound = torch.isfinite(norms).tolist()
    token_ids = scores.argmax(dim=-1).tolist()
    for index, row in enumerate(rows):
        if is_sound[index] and not row.sampling.is_greedy:
            token_ids[index] = draw(scores[index], row)
    chosen = scores[torch.arange(len(rows), device=scores.device), torch.tensor(token_ids, device=scores.device)]
    answers = zip(token_ids, (chosen - norms).tolist(), strict=True)
    return [answer if sound else None for answer, sound in zip(answers, is_sound, strict=True)]


def draw(logits: Tensor, row: SampledRow) -> int:
    """Return the id drawn from `logits` [vocabulary], float32, for a row that is not greedy; their maximum is finite."""
    kept_ids, kept_scores = keep(logits, row.sampling)
    noise = gumbel(row.sampling.seed, kept_ids.cpu().numpy(), row.position, row.sequence)
    return int(kept_ids[int(np.argmax(kept_scores.cpu().numpy() + noise))])


def keep(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the ids [kept], ascending, that pass the filters, and their z [kept], float64; at least the most likely id.

    Probabilities are compared in float32, as transformers does: where a border is a tie, rounding decides.
    """
    scores = (logits.double() - logits.amax()) / sampling.temperature
    ids = torch.arange(scores.shape[0], device=scores.device)
    if sampling.top_k > 0:
        least = torch.topk(scores, min(sampling.top_k, scores.shape[0])).values[-1]
        chosen = scores >= least
        ids, scores = ids[chosen], scores[chosen]
    if sampling.top_p < 1.0:
        ascending, order = torch.sort(scores.float(), descending=False)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        removed[-1] = False
        chosen = torch.empty_like(removed).scatter_(0, order, ~removed)
        ids, scores = ids[chosen], scores[chosen]
    if sampling.min_p > 0.0:
        probabilities = torch.softmax(scores.float(), dim=-1)
        chosen = probabilities >= sampling.min_p * probabilities.amax()
        ids, scores = ids[chosen], scores[chosen]
    return ids, scores
