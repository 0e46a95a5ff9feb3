"""What a step asks of its backend: its plan, its attention, its wire form; and how decode steps are put into buckets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from pdserve.core.layout import KvLayout, LayerLayout
from pdserve.core.work import Sampling
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.decode_graphs import ROW_BUCKETS, DecodeGraphs, Run, cuda_graphs
from pdserve.engine.engine import _current
from pdserve.engine.kv_pool import KvPool
from pdserve.kernels.backends import BACKENDS, Backend
from pdserve.kernels.logits import Chosen, SampledRow
from tests.engine.small import GREEDY_ROW, first_choices, model_of, small_engine

TORCH = BACKENDS["torch-sdpa"]
CPU = torch.device("cpu")


def test_the_pool_packs_and_unpacks_with_its_backend() -> None:
    calls: list[str] = []
    backend = replace(TORCH, pack=lambda *_: calls.append("pack"), unpack=lambda *_: calls.append("unpack"))
    layout = KvLayout((LayerLayout(2, 16, 16, None),), "float32")
    pool = KvPool(layout, num_blocks=2, block_size=4, device=CPU, backend=backend)
    pool.pack(range(1), pool.slots([0], range(4)), memoryview(bytearray(1)))
    pool.unpack(range(1), pool.slots([0], range(4)), memoryview(b"x"))
    assert calls == ["pack", "unpack"]


def test_a_step_lets_its_backend_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    def thirteen(scores: Tensor, rows: Sequence[SampledRow]) -> Tensor:
        return torch.full((len(rows),), 13)

    monkeypatch.setitem(BACKENDS, "torch-sdpa", replace(TORCH, draw_rows=thirteen))
    drawn, filtered = (SampledRow(Sampling(1.0, top_k=top_k, seed=2), 0, 0) for top_k in (0, 1))
    chunks = [SequenceChunk((5,), 0, [block], (row,)) for block, row in enumerate((GREEDY_ROW[0], drawn, filtered))]
    engine = small_engine(backend="torch-sdpa")
    tokens = [choice.token_id for choice in first_choices(engine.step(chunks)) if isinstance(choice, Chosen)]
    assert tokens[1] == 13
    assert tokens[0] == tokens[2] != 13


def test_kernels_are_launched_on_the_engines_own_device() -> None:
    """Triton launches on the thread's current device: with `--device cuda:1` that was another one than the tensors'."""
    guard = _current(torch.device("cuda:1"))
    assert isinstance(guard, torch.cuda.device)
    assert guard.idx == 1


def into_one_buffer(run: Run) -> Run:
    """Answer as a captured graph does: always in the same memory."""
    buffer = run()

    def replay() -> Tensor:
        buffer.copy_(run())
        return buffer

    return replay


def graphs_over(backend: Backend, max_length: int) -> tuple[DecodeGraphs, list[tuple[int, int]]]:
    made: list[tuple[int, int]] = []

    def static(num_rows: int, max_length: int, block_size: int, device: torch.device) -> "Static":
        made.append((num_rows, max_length))
        return Static(num_rows)

    engine = small_engine("llama")
    own = replace(backend, static_plan=static, attend=lambda query, *_, **__: query, write_kv=lambda *_: None)
    return DecodeGraphs(model_of("llama").module, engine._pool, own, CPU, max_length, into_one_buffer), made


class Static:
    """A plan that only counts."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.positions = torch.zeros(num_rows, dtype=torch.int64)
        self.write_slots = torch.zeros(num_rows, dtype=torch.int64)
        self.filled: list[int] = []

    def fill(self, chunks: object) -> None:
        assert isinstance(chunks, list)
        self.filled.append(len(chunks))


def step(num_rows: int, position: int) -> list[SequenceChunk]:
    return [SequenceChunk((5 + row,), position, [0], GREEDY_ROW) for row in range(num_rows)]


def test_steps_share_a_bucket_that_holds_them() -> None:
    graphs, made = graphs_over(TORCH, 20_000)
    for num_rows, position in ((1, 0), (4, 1023), (3, 10), (4, 1024), (3, 4095), (4, 4096), (4, 19_999)):
        answer: Tensor = graphs.logits(step(num_rows, position))
        assert answer.shape[0] == num_rows
    assert made == [(1, 1024), (4, 1024), (4, 4096), (4, 16384), (4, 20_000)]
    assert graphs.num_buckets == len(made)


class PlayedCuda:
    """torch's streams and capture, played: one that fails leaves its stream behind, as `torch.cuda.graph` does."""

    def __init__(self, error: str | None) -> None:
        self.error = error
        self.engines, self.captures = mock.Mock(), mock.Mock()
        self.current = self.engines

    @contextmanager
    def stream(self, stream: mock.Mock) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, *args: object, **kwargs: object) -> Iterator[None]:
        before, self.current = self.current, self.captures
        yield
        if self.error is not None:
            raise RuntimeError(self.error)
        self.current = before


@pytest.mark.parametrize("error", [None, "operation not permitted when stream is capturing"])
def test_a_step_that_cannot_be_captured_is_launched_as_ever(
    error: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """What CUDA does about it is a GPU's to show. Launched in another stream, KV was packed before it was computed."""
    streams: list[mock.Mock] = []
    played = PlayedCuda(error)

    def run() -> Tensor:
        streams.append(played.current)
        return torch.ones(1)

    with mock.patch.object(torch, "cuda") as cuda:
        cuda.stream, cuda.graph = played.stream, played.graph
        cuda.current_stream = lambda: played.current
        replay = cuda_graphs()(run)
    assert len(streams) == 3, "twice to warm up, once to capture"
    assert torch.equal(replay(), torch.ones(1))
    assert streams[3:] == ([] if error is None else [played.engines])
    assert ("cannot be captured" in caplog.text) == (error is not None)


def test_an_answer_survives_the_next_replay() -> None:
    graphs, _ = graphs_over(TORCH, 64)
    first = graphs.logits(step(2, 3))
    kept = first.clone()
    graphs.logits([SequenceChunk((90 + row,), 4, [0], GREEDY_ROW) for row in range(2)])
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("chunks", "kept"),
    [
        ([SequenceChunk((1, 2), 0, [0], GREEDY_ROW)], [(1,)]),
        ([SequenceChunk((1,), 0, [0])], [()]),
        (step(ROW_BUCKETS[-1] + 1, 0), [(0,)] * (ROW_BUCKETS[-1] + 1)),
    ],
    ids=["a prompt's chunk", "nothing kept", "too many"],
)
def test_other_steps_are_not_captured(chunks: list[SequenceChunk], kept: list[tuple[int, ...]]) -> None:
    graphs, _ = graphs_over(TORCH, 64)
    assert not graphs.serves(chunks, kept)
    assert graphs.serves(step(2, 0), [(0,), (0,)])
