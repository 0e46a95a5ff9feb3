"""Choose the next token of each sampled row, after `processors` had their say.

Greedy: argmax of the processed logits; otherwise `gumbel_max` draws one. A row fails by itself, never its neighbours.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.core.work import TopLogprobs
from pdserve.kernels.gumbel_max import draw
from pdserve.kernels.logits import Choice, Chosen, RowFailed, SampledRow
from pdserve.kernels.processors import process

BROKEN_LOGITS = RowFailed("the model's logits hold NaN or infinity")
NOTHING_ALLOWED = RowFailed(
    "no token is allowed: grammar, allowed, banned and ending tokens together leave none", is_final=True
)
OVERFLOW = RowFailed("biases and penalties together make a logit infinite", is_final=True)


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
        RowFailed(reasons[index], is_final=True) if index in reasons else pick if is_sound[index] else BROKEN_LOGITS
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


def _pick(scores: Tensor, rows: Sequence[SampledRow], is_sound: Sequence[bool]) -> list[int | RowFailed]:
    """Return a token per row of processed logits, or why there is none; anything for a row that is not sound."""
    best = scores.amax(dim=-1).tolist()
    picks: list[int | RowFailed] = [
        NOTHING_ALLOWED if top == -np.inf else OVERFLOW if top == np.inf else token
        for top, token in zip(best, scores.argmax(dim=-1).tolist(), strict=True)
    ]
    drawn = [
        index
        for index, row in enumerate(rows)
        if is_sound[index] and not row.sampling.is_greedy and not isinstance(picks[index], RowFailed)
    ]
    if drawn:
        host = scores.cpu().numpy()
        tokens = draw([host[index] for index in drawn], [rows[index] for index in drawn])
        for index, token in zip(drawn, tokens, strict=True):
            picks[index] = token
    return picks


def _with_logprobs(
    raw: Tensor, norms: Tensor, rows: Sequence[SampledRow], picks: Sequence[int | RowFailed]
) -> list[Choice]:
    token_ids = torch.tensor([0 if isinstance(pick, RowFailed) else pick for pick in picks], device=raw.device)
    logprobs = (raw.gather(1, token_ids[:, None])[:, 0] - norms).tolist()
    asking = [index for index, row in enumerate(rows) if row.num_top]
    most = max((row.num_top for row in rows), default=0)
    some = slice(None) if len(asking) == len(rows) else asking  # all of them need no copy
    tops = dict(zip(asking, _tops(raw[some], norms[some], most), strict=True)) if asking else {}
    return [
        pick if isinstance(pick, RowFailed) else Chosen(pick, logprobs[index], tops.get(index, ())[: row.num_top])
        for index, (row, pick) in enumerate(zip(rows, picks, strict=True))
    ]


def _tops(raw: Tensor, norms: Tensor, num_top: int) -> list[TopLogprobs]:
    values, ids = torch.topk(raw, min(num_top, raw.shape[-1]), dim=-1)
    logprobs = (values - norms[:, None]).tolist()
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logprobs, strict=True)]
