"""A draw from the likeliest ids is the draw from all of them, or none."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.work import Sampling
from pdserve.kernels import gumbel_max, shortlist
from pdserve.kernels.gumbel_max import draw, keep, kth_largest
from pdserve.kernels.logits import SampledRow
from pdserve.kernels.shortlist import draw_listed

VOCABULARY, LISTED = 300, 64
FILTERS = list(product((1e-45, 0.3, 1.0, 1.7), (0, 1, 5, 63, 64, 65, 10_000), (1.0, 0.9, 0.3, 1e-9), (0.0, 0.02, 0.5)))


def logits_of(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(VOCABULARY, generator=generator) * 3
    if kind == "forbidden":
        spread[torch.rand(VOCABULARY, generator=generator) < 0.9] = -torch.inf
    return {
        "spread": spread,
        "forbidden": spread,
        "ties": torch.randint(0, 4, (VOCABULARY,), generator=generator).float(),
        "ties at the end of the list": torch.cat([torch.arange(60.0) / 20 + 1, torch.zeros(VOCABULARY - 60)]),
        "flat": torch.full((VOCABULARY,), 2.0),
    }[kind]


def told(kind: str, monkeypatch: pytest.MonkeyPatch) -> dict[Sampling, bool]:
    """Hold every filter's draws to those from all logits; return for which the list was enough."""
    monkeypatch.setattr(shortlist, "NUM_LISTED", LISTED)
    logits, enough = logits_of(kind), {}
    for heat, top_k, top_p, min_p in FILTERS:
        sampling = Sampling(heat, top_k, top_p, min_p, seed=2**64 - 7)
        rows = [SampledRow(sampling, index % 2, index) for index in range(8)]
        found = draw_listed(logits.repeat(8, 1), rows)
        expected = draw([logits.numpy()] * 8, rows)
        assert found in ([None] * 8, expected), sampling
        enough[sampling] = found == expected
    return enough


@pytest.mark.parametrize("kind", ["spread", "forbidden", "ties", "ties at the end of the list", "flat"])
def test_a_list_tells_the_draw_or_says_that_it_cannot(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told(kind, monkeypatch)


def test_a_list_is_enough_where_filters_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = told("spread", monkeypatch)
    assert all(is_enough for sampling, is_enough in enough.items() if 0 < sampling.top_k < LISTED)
    assert all(
        is_enough for sampling, is_enough in enough.items() if sampling.top_p <= 0.3 and sampling.top_k in {0, 5}
    )
    assert not any(is_enough for sampling, is_enough in enough.items() if sampling.top_k >= LISTED)
    assert all(told("forbidden", monkeypatch).values()), "fewer are allowed than are listed"


def test_a_whole_vocabulary_is_always_enough() -> None:
    logits = logits_of("flat")
    row = SampledRow(Sampling(1.0, min_p=0.5, seed=4), 0, 1)
    assert draw_listed(logits[None], [row]) == draw([logits.numpy()], [row])


def test_equal_logits_may_be_listed_in_any_order() -> None:
    """Of equal logits at the border of top-p the lower ids stay; a device lists equals as it likes."""
    logits, ids = np.full(30, 2.0, np.float32), np.arange(30)
    for position in range(20):
        row = SampledRow(Sampling(1.0, top_p=0.3, seed=5), 0, position)
        found = shortlist._draw_one(logits, ids[::-1], 30.0, row, is_whole=True)
        assert [found] == draw([logits], [row])


LEAST = float(np.finfo(np.float32).min)
SAMPLINGS = st.builds(
    Sampling,
    st.sampled_from([1e-45, 0.3, 1.0, 50.0]),
    st.just(0) | st.integers(1, 14),
    st.sampled_from([1.0, 0.95, 0.9, 0.8, 0.5, 1e-9]),
    st.just(0.0) | st.sampled_from([0.02, 0.5, 0.99]),
    st.integers(0, 2**64 - 1),
)


@settings(deadline=None, max_examples=1500, derandomize=True)
@given(
    st.lists(st.sampled_from([-np.inf, LEAST, -1.0, 0.0, 0.5, 1.0, 2.0, 5.0]), min_size=1, max_size=12),
    SAMPLINGS,
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_a_list_tells_what_all_logits_tell_exactly_where_it_can(
    values: list[float], sampling: Sampling, num_listed: int, nucleus_guess: int
) -> None:
    """Few values, so that ties lie across every border; and short lists, so that each filter ends before, at or after theirs."""
    logits = np.array([*values, 0.0], np.float32)
    row = SampledRow(sampling, 1, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortlist, "NUM_LISTED", num_listed)
        patch.setattr(gumbel_max, "NUCLEUS_GUESS", nucleus_guess)
        (found,) = draw_listed(torch.from_numpy(logits)[None], [row])
        kept, _ = keep(logits, sampling)
    least = np.sort(logits)[::-1][:num_listed].min()
    has_all = num_listed >= len(logits) or least == -np.inf
    knows_top_k = not sampling.top_k or kth_largest(logits, sampling.top_k) > least
    can_tell = has_all or (knows_top_k and logits[kept].min() > least)
    assert found == (draw([logits], [row])[0] if can_tell else None)
