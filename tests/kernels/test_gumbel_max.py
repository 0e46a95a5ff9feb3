"""What is left out to be fast changes nothing: the draws are those of the whole computation, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.core.work import Sampling
from pdserve.kernels.gumbel_max import FOLD, NUM_FAVOURITES, contenders, draw, favourites, keep, kth_largest
from pdserve.kernels.logits import SampledRow
from pdserve.kernels.philox import gumbel

VOCAB = 30_011
SHAPES = ("peaked", "usual", "flat", "equal", "two plateaus", "mostly forbidden")


def logits_of(shape: str, seed: int = 0) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    logits = random.standard_normal(VOCAB) * {"peaked": 8.0, "usual": 3.0, "flat": 0.5}.get(shape, 1.0)
    if shape == "equal":
        logits[:] = 2.0
    elif shape == "two plateaus":
        logits[:] = -15.0
        logits[random.choice(VOCAB, 500, replace=False)] = 1.0
    elif shape == "mostly forbidden":
        logits[random.choice(VOCAB, VOCAB - 400, replace=False)] = -np.inf
    return logits.astype(np.float32)


def whole_draw(logits: NDArray[np.float32], row: SampledRow) -> int:
    """The definition: argmax of logit / T + noise over all ids."""
    z = (logits.astype(np.float64) - float(logits.max())) / row.sampling.temperature
    return int(np.argmax(z + gumbel(row.sampling.seed, np.arange(VOCAB), row.position, row.sequence)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0, 100.0])
def test_draws_are_those_of_the_whole_computation(shape: str, temperature: float) -> None:
    logits = logits_of(shape)
    rows = [SampledRow(Sampling(temperature, seed=2**63 + n), n % 3, 7 * n) for n in range(12)]
    expected = [whole_draw(logits, row) for row in rows]
    assert draw([logits] * 12, rows) == expected
    assert [draw([logits], [row])[0] for row in rows] == expected
    if shape != "peaked" and temperature >= 1.0:
        assert len(set(expected)) > 6  # the noise does decide


@pytest.mark.parametrize("shape", SHAPES)
def test_a_favourite_need_not_win(shape: str) -> None:
    """The bound that the favourites set must not keep out who beats it: some winners are none of them."""
    logits = logits_of(shape)
    favourites = set(np.argsort(-logits, kind="stable")[:NUM_FAVOURITES].tolist())
    rows = [SampledRow(Sampling(1.0, seed=n), 0, n) for n in range(60)]
    winners = draw([logits] * 60, rows)
    assert winners == [whole_draw(logits, row) for row in rows]
    if shape in ("flat", "equal", "usual"):
        assert not set(winners) <= favourites


def test_few_contenders_are_left() -> None:
    logits, row = logits_of("usual"), SampledRow(Sampling(1.0, seed=3), 0, 0)
    ids, z = favourites(logits, row.sampling)
    assert ids.shape[0] == NUM_FAVOURITES
    bound = float((z + gumbel(3, ids, 0, 0)).max())
    assert 1 <= contenders(logits, row, bound)[0].shape[0] < 20


def test_rows_of_every_kind_are_drawn_together_as_alone() -> None:
    """Some rows are settled among their favourites, others are not."""
    scores = [logits_of(shape, seed) for seed, shape in enumerate(SHAPES * 2)]
    samplings = [
        Sampling(1.0, seed=n, top_k=(0, 50, 0, 0)[n % 4], top_p=(1.0, 1.0, 0.9, 1.0)[n % 4]) for n in range(12)
    ]
    rows = [SampledRow(sampling, n % 2, n) for n, sampling in enumerate(samplings)]
    assert draw(scores, rows) == [draw([logits], [row])[0] for logits, row in zip(scores, rows, strict=True)]
    assert draw([], []) == []


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40 * FOLD), st.integers(1, 400), st.integers(1, 30), st.integers(0, 2**30))
def test_kth_largest_is_that_of_the_sorted_values(size: int, k: int, num_levels: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, num_levels, size).astype(np.float32)
    values[::5] = -np.inf
    assert kth_largest(values, k) == np.sort(values)[::-1][min(k, size) - 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.5, 0.9, 0.99, 0.99999])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(shape: str, top_p: float) -> None:
    logits = logits_of(shape)
    ids, _ = keep(logits, Sampling(1.0, top_p=top_p))
    order = np.lexsort((np.arange(VOCAB), -logits))
    probabilities = np.exp(logits[order].astype(np.float64))
    reached = np.cumsum(probabilities / probabilities.sum())
    before = np.concatenate(([0.0], reached[:-1]))
    unsure = np.abs(before - top_p) < 1e-9
    kept = np.isin(order, ids)
    assert np.array_equal(kept[~unsure], (before < top_p)[~unsure])
    assert ids.tolist() == sorted(ids.tolist())
