"""The sampler against transformers' own logits processors, and the draw against what decides it."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pdserve.core.work import Sampling
from pdserve.kernels.sampling import SampledRow, keep, sample

FILTERS = list(product((0.3, 1.0, 1.7), (0, 1, 5, 10_000), (1.0, 0.9, 0.3, 1e-9), (0.0, 0.02, 0.5)))


def processed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return probabilities [vocabulary] after the processors that `generate` would build, in its order."""
    processors: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    scores = logits[None]
    for processor in processors:
        scores = processor(torch.zeros(1, 1, dtype=torch.int64), scores)
    return torch.softmax(scores[0], dim=-1)


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
def test_kept_probabilities_equal_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p)
    generator = torch.Generator().manual_seed(top_k)
    for logits in (
        torch.randn(300, generator=generator) * 3,
        torch.randint(0, 4, (300,), generator=generator).float(),  # ties everywhere
        torch.full((300,), 2.0),
    ):
        ids, scores = keep(logits, sampling)
        ours = torch.zeros(300).index_put((ids,), torch.softmax(scores, dim=-1))
        assert ids.tolist() == sorted(ids.tolist())
        # Among equal logits the two sorts of top-p may part the ties elsewhere: the probabilities are what is promised.
        torch.testing.assert_close(ours.sort().values, processed(logits, sampling).sort().values, atol=1e-6, rtol=1e-5)


def test_greedy_takes_the_best_and_its_log_probability() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    rows = [SampledRow(Sampling(), 0, 0)] * 2
    answer = sample(logits, rows)
    assert [token for token, _ in answer] == [1, 0]
    expected = torch.log_softmax(logits, dim=-1)
    assert answer[0][1] == pytest.approx(float(expected[0, 1]), abs=1e-6)
    assert answer[1][1] == pytest.approx(float(expected[1, 0]), abs=1e-6)


def test_log_probability_is_that_of_the_unmodified_distribution() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    (token, logprob), *_ = sample(logits, [SampledRow(Sampling(0.5, top_k=3, seed=11), 0, 0)])
    assert logprob == pytest.approx(float(torch.log_softmax(logits, dim=-1)[0, token]), abs=1e-6)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(16, 400, generator=generator)
    rows = [SampledRow(Sampling(0.7 + index / 20, top_p=0.95, seed=index % 3), index % 2, index) for index in range(16)]
    alone = [sample(logits[index : index + 1], [rows[index]])[0][0] for index in range(16)]
    order = torch.randperm(16, generator=generator).tolist()
    mixed = sample(logits[order], [rows[index] for index in order])
    assert [token for token, _ in mixed] == [alone[index] for index in order]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    sampling = Sampling(0.8, seed=42)
    count = 6000
    drawn = np.bincount(
        [sample(logits[None], [SampledRow(sampling, 0, position)])[0][0] for position in range(count)], minlength=5
    )
    for share, expected in zip(drawn / count, torch.softmax(logits / 0.8, dim=-1).tolist(), strict=True):
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def test_tiny_differences_of_the_logits_do_not_change_draws() -> None:
    """Inverse-CDF sampling moves every later border by them; Gumbel-max only close calls (failure class 32)."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(500, generator=generator)
    shaken = logits + 1e-5 * torch.randn(500, generator=generator)
    rows = [SampledRow(Sampling(1.0, seed=4), 0, position) for position in range(500)]
    assert [sample(logits[None], [row])[0][0] for row in rows] == [sample(shaken[None], [row])[0][0] for row in rows]


def test_broken_numbers_are_not_sampled() -> None:
    with pytest.raises(ValueError, match="NaN"):
        sample(torch.tensor([[0.0, float("nan")]]), [SampledRow(Sampling(), 0, 0)])
    with pytest.raises(ValueError, match="1 rows of logits"):
        sample(torch.zeros(1, 3), [])
