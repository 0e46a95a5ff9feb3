"""What changes logits before a token is chosen, applied to the rows of a step in one stated order:

1. logit bias: added. 2. repetition penalty: logits of ids in prompt or output are divided by it where positive, multiplied where
negative. 3. forbidden ids become negative infinity: banned sequences that the next id would complete, ends before `min_tokens`,
what a grammar or `allowed_token_ids` leaves out, banned ids. 4. presence and frequency penalty: `presence + frequency x count` is
subtracted from ids in the output. (Then `sampling`: temperature, top-k, top-p, min-p.)

It is the order of transformers' `generate`, whose processors the tests compare with; within step 3 all orders are one, since
nothing brings negative infinity back. Penalties 4 are OpenAI's, and stand where `generate` puts a caller's own processors.
Different on purpose: where nothing is allowed the row fails, while `generate` forces an id that the processors had excluded;
and a banned sequence of a single end-of-sequence id is honoured, while `generate` drops it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.logits import ConstraintFailed, IdArray, RowState


def process(scores: Tensor, states: Mapping[int, RowState]) -> dict[int, str]:
    """Apply `states[i]` to row i of `scores` [rows, vocabulary], float32 and contiguous, in place.

    Returns the rows whose matcher failed, each with its reason. Ids outside the vocabulary are ignored.
    """
    rows, members = np.array(list(states), np.int64), list(states.values())
    if not members:
        return {}
    vocab_size = scores.shape[-1]
    flat = scores.view(-1)

    def entries(ids_per_row: Sequence[IdArray]) -> Entries:
        return Entries.of(rows, ids_per_row, vocab_size)

    _add_bias(flat, entries([state.bias_ids for state in members]), members)
    _penalize_repetition(flat, entries([state.context_ids for state in members]), members)
    forbidden = entries([state.forbidden_ids() for state in members])
    flat[torch.from_numpy(forbidden.flat).to(flat.device)] = -torch.inf
    failures = _mask(scores, states)
    _penalize_output(flat, entries([state.output_counts[0] for state in members]), members)
    return failures


@dataclass(frozen=True, slots=True)
class Entries:
    """Some ids of some rows: `flat` [entries] their places in the flattened scores.

    `owners` [all] is the index among the states of each id given, `inside` [all] whether it lies in the vocabulary: the latter
    picks from whatever is to be paired with `flat`.
    """

    flat: IdArray
    owners: IdArray
    inside: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: IdArray, ids_per_row: Sequence[IdArray], vocab_size: int) -> "Entries":
        """Collect `ids_per_row[i]` of row `rows[i]`."""
        owners = np.repeat(np.arange(len(ids_per_row)), [len(ids) for ids in ids_per_row])
        ids = np.concatenate(ids_per_row)
        inside = ids < vocab_size
        return cls((rows[owners] * vocab_size + ids)[inside], owners, inside)

    def per_row(self, values: Sequence[float]) -> NDArray[np.float32]:
        """Return each entry's value of its row, [entries]."""
        return np.array(values, np.float32)[self.owners][self.inside]


def _add_bias(flat: Tensor, entries: Entries, members: Sequence[RowState]) -> None:
    if entries.flat.size:
        values = np.concatenate([state.bias_values for state in members])[entries.inside]
        index = torch.from_numpy(entries.flat).to(flat.device)
        flat[index] += torch.from_numpy(values).to(flat.device)


def _penalize_repetition(flat: Tensor, entries: Entries, members: Sequence[RowState]) -> None:
    if entries.flat.size:
        penalties = entries.per_row([state.sampling.repetition_penalty for state in members])
        factor = torch.from_numpy(penalties).to(flat.device)
        index = torch.from_numpy(entries.flat).to(flat.device)
        values = flat[index]
        flat[index] = torch.where(values < 0, values * factor, values / factor)


def _mask(scores: Tensor, states: Mapping[int, RowState]) -> dict[int, str]:
    failures = dict[int, str]()
    vocab_size = scores.shape[-1]
    for state, rows in _rows_of(states).items():
        if not state.has_mask:
            continue
        try:
            words = state.mask(vocab_size)
        except ConstraintFailed as failed:
            failures |= dict.fromkeys(rows, str(failed))
            continue
        bits = np.unpackbits(words.astype("<i4", copy=False).view(np.uint8), count=vocab_size, bitorder="little")
        is_forbidden = torch.from_numpy(bits == 0).to(scores.device)
        for row in rows:
            scores[row].masked_fill_(is_forbidden, -torch.inf)
    return failures


def _rows_of(states: Mapping[int, RowState]) -> dict[RowState, list[int]]:
    """Return the rows of each state: the first tokens of several sequences read one, whose mask is then made once."""
    rows: dict[RowState, list[int]] = {}
    for row, state in states.items():
        rows.setdefault(state, []).append(row)
    return rows


def _penalize_output(flat: Tensor, entries: Entries, members: Sequence[RowState]) -> None:
    presence = entries.per_row([state.sampling.presence_penalty for state in members])
    frequency = entries.per_row([state.sampling.frequency_penalty for state in members])
    if presence.any() or frequency.any():
        counts = np.concatenate([state.output_counts[1] for state in members])[entries.inside]
        index = torch.from_numpy(entries.flat).to(flat.device)
        flat[index] -= torch.from_numpy(presence + frequency * counts).to(flat.device)
