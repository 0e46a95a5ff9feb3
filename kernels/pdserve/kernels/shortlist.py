"""Draw rows that have filters from a list of their likeliest ids, so that few of their logits leave the device.

What top-k, top-p and min-p keep is most often a small part of the vocabulary. The device finds the `NUM_LISTED` largest logits
of each row, and the sum that top-p is a share of; the host applies the filters to the list and draws as `gumbel_max` does. That
the list holds all that the filters keep shows in it: the lowest that is kept then lies above the lowest that is listed. Where it
does not, the answer is None, and the row is drawn from all of its logits.

The sum is float64, added in another order than the host's: an id that touches the border of top-p within 1e-13 may fall on its
other side.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.gumbel_max import keep
from pdserve.kernels.logits import IdArray, SampledRow
from pdserve.kernels.philox import gumbel

NUM_LISTED = 1024


def draw_listed(scores: Tensor, rows: Sequence[SampledRow]) -> list[int | None]:
    """Return the id drawn from each row of processed logits [rows, vocabulary], or None where the list does not tell.

    No row is greedy, and each maximum is finite.
    """
    vocabulary = scores.shape[-1]
    values, ids = scores.topk(min(NUM_LISTED, vocabulary), dim=-1)
    sums = _sums(scores, values, rows).tolist() if any(_needs_sum(row) for row in rows) else [0.0] * len(rows)
    listed = zip(values.cpu().numpy(), ids.cpu().numpy(), sums, rows, strict=True)
    return [
        _draw_one(logits, row_ids, weight if _needs_sum(row) else None, row, is_whole=len(row_ids) == vocabulary)
        for logits, row_ids, weight, row in listed
    ]


def _needs_sum(row: SampledRow) -> bool:
    """Whether top-p is a share of the sum over all ids, not only over those that top-k keeps."""
    return row.sampling.top_p < 1.0 and row.sampling.top_k == 0


def _sums(scores: Tensor, values: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Return the sum of exp(z) over each row, [rows], in float64."""
    heat = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float64).to(scores.device)
    return ((scores.double() - values[:, :1].double()) / heat[:, None]).exp().sum(dim=-1)


def _draw_one(
    logits: NDArray[np.float32], ids: IdArray, weight: float | None, row: SampledRow, *, is_whole: bool
) -> int | None:
    """Draw from a list: `logits` [listed], descending, and their `ids`; `weight` is the sum of exp(z) over all ids."""
    order = np.argsort(ids)  # as in the whole row: sums and ties are then the same
    scores, token_ids = logits[order], ids[order]
    places, z = keep(scores, row.sampling, weight=weight)
    if not is_whole and not _holds_all(logits, float(scores[places].min()), row.sampling.top_k):
        return None
    kept = token_ids[places]
    return int(kept[np.argmax(z + gumbel(row.sampling.seed, kept, row.position, row.sequence))])


def _holds_all(logits: NDArray[np.float32], lowest_kept: float, top_k: int) -> bool:
    """Whether no id that the filters keep is missing in the list `logits` [listed], descending; of it they keep `lowest_kept`."""
    least = float(logits[-1])
    if least == -np.inf:
        return True  # what is missing is forbidden
    has_kth = top_k < len(logits) and (top_k == 0 or float(logits[top_k - 1]) > least)
    return has_kth and lowest_kept > least
