"""The sampler against transformers' own logits processors, and the draw against what decides it."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pdserve.core.work import Sampling
from pdserve.kernels import shortlist
from pdserve.kernels.gumbel_max import draw, keep
from pdserve.kernels.logits import Chosen, RowFailed, RowState, SampledRow
from pdserve.kernels.sampling import OVERFLOW, sample

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


def sampled(logits: torch.Tensor, rows: list[SampledRow]) -> list[tuple[int, float]]:
    """Return the answers of `sample`, all of them tokens."""
    answers = sample(logits, rows)
    tokens = [(answer.token_id, answer.logprob) for answer in answers if isinstance(answer, Chosen)]
    assert len(tokens) == len(answers)
    return tokens


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
        ids, z = keep(logits.numpy(), sampling)
        scores = torch.from_numpy(z)
        ours = torch.zeros(300).index_put((torch.from_numpy(ids),), torch.softmax(scores, dim=-1).float())
        assert ids.tolist() == sorted(ids.tolist())
        # Among equal logits the two sorts of top-p may part the ties elsewhere: the probabilities are what is promised.
        torch.testing.assert_close(ours.sort().values, processed(logits, sampling).sort().values, atol=1e-6, rtol=1e-5)


def test_greedy_takes_the_best_and_its_log_probability() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    rows = [SampledRow(Sampling(), 0, 0)] * 2
    answer = sampled(logits, rows)
    assert [token for token, _ in answer] == [1, 0]
    expected = torch.log_softmax(logits, dim=-1)
    assert answer[0][1] == pytest.approx(float(expected[0, 1]), abs=1e-6)
    assert answer[1][1] == pytest.approx(float(expected[1, 0]), abs=1e-6)


def test_log_probability_is_that_of_the_unmodified_distribution() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    (token, logprob), *_ = sampled(logits, [SampledRow(Sampling(0.5, top_k=3, seed=11), 0, 0)])
    assert logprob == pytest.approx(float(torch.log_softmax(logits, dim=-1)[0, token]), abs=1e-6)


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(16, 400, generator=generator)
    rows = [SampledRow(Sampling(0.7 + index / 20, top_p=0.95, seed=index % 3), index % 2, index) for index in range(16)]
    alone = [sampled(logits[index : index + 1], [rows[index]])[0][0] for index in range(16)]
    order = torch.randperm(16, generator=generator).tolist()
    mixed = sampled(logits[order], [rows[index] for index in order])
    assert [token for token, _ in mixed] == [alone[index] for index in order]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    sampling = Sampling(0.8, seed=42)
    count = 6000
    drawn = np.bincount(
        [sampled(logits[None], [SampledRow(sampling, 0, position)])[0][0] for position in range(count)], minlength=5
    )
    for share, expected in zip(drawn / count, torch.softmax(logits / 0.8, dim=-1).tolist(), strict=True):
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def test_tiny_differences_of_the_logits_do_not_change_draws() -> None:
    """Inverse-CDF sampling moves every later border by them; Gumbel-max only close calls (failure class 32)."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(500, generator=generator)
    shaken = logits + 1e-5 * torch.randn(500, generator=generator)
    rows = [SampledRow(Sampling(1.0, seed=4), 0, position) for position in range(500)]
    assert [sampled(logits[None], [row])[0][0] for row in rows] == [sampled(shaken[None], [row])[0][0] for row in rows]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (0, 1.0, 0.1), (0, 0.5, 0.0), (3, 0.9, 0.5)])
def test_a_tiny_temperature_is_greedy(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Logits divided by it overflow float32: the least likely id came out, or an empty set of candidates ended the step."""
    logits = torch.tensor([[9.0, 20.0, 19.999, -30.0], [-9.0, -20.0, -8.99, -1e4], [1e30, -1e30, 9e29, 0.0]])
    rows = [SampledRow(Sampling(temperature, top_k, top_p, min_p, seed), 0, seed) for seed in range(3)]
    assert [token for token, _ in sampled(logits, rows)] == [1, 2, 0]


def test_a_high_temperature_follows_the_distribution() -> None:
    logits = torch.tensor([3e38, 3e38, -3e38, float("-inf")])  # apart by more than float32 can hold
    drawn = [sampled(logits[None], [SampledRow(Sampling(100.0), 0, position)])[0][0] for position in range(400)]
    assert set(drawn) == {0, 1}
    assert 140 < drawn.count(0) < 260


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=1), Sampling(1.0, 5, 0.9, 0.1, seed=2)])
@pytest.mark.parametrize("broken", [[0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [float("-inf")] * 3])
def test_broken_logits_fail_their_own_row_only(sampling: Sampling, broken: list[float]) -> None:
    """One request's broken numbers ended every request of its step."""
    neighbour = [0.0, 1.0, float("-inf")]  # an id that can never come is no fault
    rows = [SampledRow(sampling, 0, position) for position in range(3)]
    answers = sample(torch.tensor([neighbour, broken, neighbour]), rows)
    assert isinstance(answers[1], RowFailed)
    assert "NaN" in answers[1].reason
    alone = [sample(torch.tensor([neighbour]), [row])[0] for row in (rows[0], rows[2])]
    assert [answers[0], answers[2]] == alone


@pytest.mark.parametrize("logits", [[0.0, 1.0], [0.0, -math.inf]])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_processors_that_make_no_number_fail_their_row(logits: list[float], heat: float) -> None:
    """An infinite bias of an id that can never come is NaN: its row was answered with that id."""
    sampling = Sampling(heat, logit_bias=((1, math.inf),))
    (answer,) = sample(torch.tensor([logits]), [SampledRow(sampling, 0, 0, state=RowState(sampling, [], []))])
    assert answer == OVERFLOW


def test_the_numbers_of_rows_must_agree() -> None:
    with pytest.raises(ValueError, match="1 rows of logits"):
        sample(torch.zeros(1, 3), [])


class DeviceDraw:
    """Draws as a device would: what it is given is noted, and rows without a finite maximum get nonsense."""

    def __init__(self) -> None:
        self.rows: list[SampledRow] = []

    def __call__(self, scores: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
        self.rows += rows
        found = [
            draw([row.detach().numpy()], [how])[0] if row.amax().isfinite() else 2**31 - 1
            for row, how in zip(scores, rows, strict=True)
        ]
        return torch.tensor(found)


class Crossings(TorchFunctionMode):
    """Notes how many numbers each read by the host takes from tensors, as if they lay on a device."""

    READS = frozenset({"cpu", "numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__"})

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in self.READS:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


PENALIZED = Sampling(0.9, seed=3, repetition_penalty=1.3, logit_bias=((4, 2.0),))


def rows_of_all_kinds() -> list[SampledRow]:
    state = RowState(PENALIZED, [4, 9], [17])
    return [
        SampledRow(Sampling(), 0, 5),
        SampledRow(Sampling(0.8, seed=2**64 - 1), 1, 0),
        SampledRow(Sampling(0.8, top_p=0.9, seed=1), 0, 4),
        SampledRow(PENALIZED, 0, 1, 2, state),
        SampledRow(Sampling(1.2, top_k=7, seed=1), 0, 4),
        SampledRow(Sampling(0.5, min_p=0.1, seed=1), 0, 4),
        SampledRow(Sampling(1.5, seed=9), 0, 77),
        SampledRow(Sampling(1.5, seed=9), 0, 78),
    ]


def test_a_backend_draws_the_rows_that_have_no_filters_and_nothing_changes() -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(2)) * 2
    logits[7, 11] = float("nan")
    rows, device = rows_of_all_kinds(), DeviceDraw()
    answers = sample(logits, rows, device)
    assert device.rows == [rows[index] for index in (1, 3, 6, 7)]
    assert isinstance(answers[7], RowFailed)
    assert answers == sample(logits, rows)


def test_of_rows_that_a_backend_draws_only_the_answers_reach_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a batch are [64, 128256] floats a step: a copy of 33 MB, where four numbers a row will do."""
    vocabulary = 300
    logits = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(2))
    rows = rows_of_all_kinds()

    def device_draw(scores: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.int64)

    plain = [0, 1, 6, 7]
    with Crossings() as crossings:
        sample(logits[plain], [rows[index] for index in plain], device_draw)
    assert crossings.sizes == [4 * len(plain)]
    monkeypatch.setattr(shortlist, "NUM_LISTED", 64)
    with Crossings() as crossings:
        sample(logits, rows, device_draw)
    assert max(crossings.sizes) == 8 * vocabulary, "top-p of 0.9 keeps more than is listed: the row is copied"
    narrow = [index for index in range(8) if index != 2]
    with Crossings() as crossings:
        sample(logits[narrow], [rows[index] for index in narrow], device_draw)
    assert max(crossings.sizes) == 2 * 64, "a list of each row that has filters"
