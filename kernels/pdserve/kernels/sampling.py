"""Choose the next token of each sampled row, after `processors` had their say.

Greedy: argmax of the processed logits; otherwise `gumbel_max` draws one, on the host, or a backend's `DrawRows` where the logits
lie: the same noise, and so the same token. A row fails by itself, never its neighbours.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.core.work import Sampling, TopLogprobs
from pdserve.kernels.gumbel_max import draw
from pdserve.kernels.logits import Choice, Chosen, RowFailed, SampledRow
from pdserve.kernels.processors import process
from pdserve.kernels.shortlist import draw_listed

BROKEN_LOGITS = RowFailed("the model's logits hold NaN or infinity")
NOTHING_ALLOWED = RowFailed(
    "no token is allowed: grammar, allowed, banned and ending tokens together leave none", is_final=True
)
OVERFLOW = RowFailed("biases and penalties together make a logit infinite", is_final=True)


class DrawRows(Protocol):
    """Draws rows that have no filters, on the device on which their logits lie."""

    def __call__(self, scores: Tensor, rows: Sequence[SampledRow]) -> Tensor:
        """Return ids [rows], int64, of processed logits [rows, vocabulary], float32: the tokens of `gumbel_max.draw`.

        What it returns for a row that has no finite maximum means nothing. The host is not made to wait for the device.
        """
        ...


class Summarize(Protocol):
    """Looks at rows of logits, as `summarize` does."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return of `logits` [rows, vocabulary], float32: log-sum-exp, largest [rows], and its id [rows], int64.

        Log-sum-exp is not finite where a logit is NaN or +infinity, or all are -infinity; what the others are then means nothing.
        """
        ...


def summarize(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do so with torch."""
    return torch.logsumexp(logits, dim=-1), logits.amax(dim=-1), logits.argmax(dim=-1)


def sample(
    logits: Tensor, rows: Sequence[SampledRow], draw_rows: DrawRows | None = None, summarize: Summarize = summarize
) -> list[Choice]:
    """Return what each row of `logits` [rows, vocabulary] gets; log-probabilities are of the unmodified distribution.

    With `draw_rows`, only the likeliest ids of rows that have filters leave the device, and all logits of a row whose filters
    keep more; without it, those of all rows that are drawn. Where none leave, the answer is one copy of four numbers a row, and
    the likeliest tokens beside it where they are asked for.

    A row fails by itself where its logits define no distribution (one is NaN or positive infinity, or all are negative
    infinity), where its processors leave nothing, or where its matcher fails. Raises ValueError if the numbers of rows differ;
    never for what one row holds, since its neighbours have no part in that.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
    if not rows:
        return []
    raw = logits.float()
    norms, best, token_ids = summarize(raw)
    states = {index: row.state for index, row in enumerate(rows) if row.state is not None}
    scores = raw.clone() if states else raw
    reasons = process(scores, states)
    if states:
        best, token_ids = scores.amax(dim=-1), scores.argmax(dim=-1)
    _draw(scores, rows, token_ids, torch.isfinite(norms) & torch.isfinite(best), draw_rows)
    logprobs = raw.gather(1, token_ids[:, None])[:, 0] - norms
    answers = torch.stack([column.double() for column in (norms, best, token_ids, logprobs)], dim=1).tolist()
    tops = _asked_tops(raw, norms, rows)
    return [
        _fault(norm, top_score, reasons.get(index)) or Chosen(int(token_id), logprob, tops.get(index, ()))
        for index, (norm, top_score, token_id, logprob) in enumerate(answers)
    ]


def log_probabilities(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[tuple[float, TopLogprobs]]:
    """Return of each row of `logits` [rows, vocabulary] the natural log-probability of its token, and the most likely ones.

    NaN where the logits are broken.
    """
    raw = logits.float()
    norms = torch.logsumexp(raw, dim=-1)
    chosen = raw.gather(1, torch.tensor(token_ids, device=raw.device)[:, None])[:, 0] - norms
    tops = _tops(raw, norms, num_top) if num_top else [()] * len(token_ids)
    return list(zip(chosen.tolist(), tops, strict=True))


def _fault(norm: float, best: float, reason: str | None) -> RowFailed | None:
    """Return why a row gets no token: `norm` of its logits, its `best` processed logit, and its matcher's reason."""
    if not math.isfinite(norm):
        return BROKEN_LOGITS
    if reason is not None:
        return RowFailed(reason, is_final=True)
    if best == -math.inf:
        return NOTHING_ALLOWED
    return None if math.isfinite(best) else OVERFLOW


def _draw(
    scores: Tensor, rows: Sequence[SampledRow], token_ids: Tensor, can_draw: Tensor, draw_rows: DrawRows | None
) -> None:
    """Put the drawn ids of rows that are not greedy into `token_ids` [rows], which holds the most likely ones.

    Rows that `can_draw` [rows] leaves out keep theirs; `scores` [rows, vocabulary] are processed.
    """
    drawn = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
    unfiltered = [index for index in drawn if not _has_filters(rows[index].sampling)]
    if draw_rows is not None and unfiltered:
        places = _there(unfiltered, scores.device)
        some = scores if len(unfiltered) == len(rows) else scores[places]
        found = draw_rows(some, [rows[index] for index in unfiltered])
        token_ids[places] = torch.where(can_draw[places], found, token_ids[places])
        drawn = sorted(set(drawn) - set(unfiltered))
    if drawn:
        can = can_draw.tolist()
        wanted = [index for index in drawn if can[index]]
        found_ids = _drawn_on_host(scores, rows, wanted, is_near=draw_rows is None)
        token_ids[_there(wanted, scores.device)] = _there(found_ids, scores.device)


def _has_filters(sampling: Sampling) -> bool:
    """Whether a row with these parameters is drawn among some of the ids only: `DrawRows` cannot."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _there(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as int64 on a device; the host does not ask to wait for it."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def _drawn_on_host(scores: Tensor, rows: Sequence[SampledRow], wanted: Sequence[int], *, is_near: bool) -> list[int]:
    """Return the ids drawn for the rows `wanted`: from their likeliest ids, or all where logits are near or those too few."""
    listed: list[int | None] = [None] * len(wanted)
    if wanted and not is_near:
        listed = draw_listed(scores[list(wanted)], [rows[index] for index in wanted])
    whole = [index for index, token in zip(wanted, listed, strict=True) if token is None]
    others = iter(draw(_on_host(scores, whole), [rows[index] for index in whole]) if whole else ())
    return [next(others) if token is None else token for token in listed]


def _on_host(scores: Tensor, rows: Sequence[int]) -> list[NDArray[np.float32]]:
    """Return some rows of `scores` as arrays; of a device's, no others are copied."""
    if scores.device.type == "cpu":
        host = scores.numpy()
        return [host[row] for row in rows]
    return list(scores[list(rows)].cpu().numpy())


def _asked_tops(raw: Tensor, norms: Tensor, rows: Sequence[SampledRow]) -> dict[int, TopLogprobs]:
    """Return of each row that asks for them the most likely tokens."""
    asking = [index for index, row in enumerate(rows) if row.num_top]
    if not asking:
        return {}
    some = slice(None) if len(asking) == len(rows) else asking  # all of them need no copy
    tops = _tops(raw[some], norms[some], max(row.num_top for row in rows))
    return {index: top[: rows[index].num_top] for index, top in zip(asking, tops, strict=True)}


def _tops(raw: Tensor, norms: Tensor, num_top: int) -> list[TopLogprobs]:
    values, ids = torch.topk(raw, min(num_top, raw.shape[-1]), dim=-1)
    logprobs = (values - norms[:, None]).tolist()
    return [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logprobs, strict=True)]
