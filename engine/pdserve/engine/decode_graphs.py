"""Decode steps of fixed shapes, captured once and replayed: one launch by the host in the place of hundreds.

A step of single rows is padded to a *bucket*: so many rows, sequences of at most so many positions. Each bucket owns its static
inputs and a plan that is filled again before each replay; idle rows write nothing and see nothing. Steps that hold anything else
(chunks of a prompt, layers to be reported, scores) are computed launch by launch, so that a prefill node hands over layer by
layer as ever.

Capture itself has not been run on a GPU yet. What is run in tests is everything around it, with `eagerly` in its place.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.attention import PagedFrame, entered
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.kv_pool import KvPool
from pdserve.kernels.backends import Backend, StaticPlan
from pdserve.kernels.ragged import ChunkRows

log = logging.getLogger(__name__)

Run = Callable[[], Tensor]
Capture = Callable[[Run], Run]
"""Takes what computes the logits from static inputs; returns what does so again from what the inputs then hold."""

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
FIRST_LENGTH = 1024
LENGTH_STEP = 4
"""Buckets of positions are FIRST_LENGTH times powers of this, so that the splits of attention suit the context."""


def eagerly(run: Run) -> Run:
    """Capture nothing: compute launch by launch."""
    return run


def cuda_graphs() -> Capture:
    """Return what captures CUDA graphs. They share their memory: no two run at once, and none reads what another left.

    A step that cannot be captured (the model's forward waits for the device, as dynamic RoPE does) is computed launch by launch
    from the same static inputs, and the log says so. Not run on a GPU yet.
    """
    memory = torch.cuda.graph_pool_handle()

    def capture(run: Run) -> Run:
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):  # kernels are compiled and workspaces allocated outside the capture
            run()
            run()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream behind as the current one; this step's must follow those of before.
        as_before = torch.cuda.stream(torch.cuda.current_stream())
        try:
            # Of this thread alone: another one may be placing KV meanwhile.
            with as_before, torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                logits = run()
        except RuntimeError as error:  # the run itself went well twice just now
            log.warning("decode steps are launched one by one: this one cannot be captured (%s)", error)
            return run

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return capture


@dataclass(frozen=True, slots=True)
class _Bucket:
    token_ids: Tensor
    plan: StaticPlan
    replay: Run


class DecodeGraphs:
    """The captured steps of one model on one pool; each is made when a step first needs it. Used by one thread at a time."""

    def __init__(
        self,
        module: torch.nn.Module,
        pool: KvPool,
        backend: Backend,
        device: torch.device,
        max_length: int,
        capture: Capture | None = None,
    ) -> None:
        assert backend.static_plan is not None
        self._module = module
        self._pool = pool
        self._backend = backend
        self._make_plan = backend.static_plan
        self._device = device
        self._max_length = max_length
        self._capture = capture or cuda_graphs()
        self._buckets: dict[tuple[int, int], _Bucket] = {}

    @property
    def num_buckets(self) -> int:
        """Buckets made so far."""
        return len(self._buckets)

    def serves(self, chunks: Sequence[SequenceChunk], kept_rows: Sequence[Sequence[int]]) -> bool:
        """Whether a step is one row each of not too many sequences, all of which are wanted."""
        return len(chunks) <= ROW_BUCKETS[-1] and all(
            len(chunk.token_ids) == 1 and list(kept) == [0] for chunk, kept in zip(chunks, kept_rows, strict=True)
        )

    def logits(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Return the logits [chunks, vocabulary] of a step that is served."""
        bucket = self._bucket(len(chunks), max(chunk.start + 1 for chunk in chunks))
        bucket.plan.fill([ChunkRows(chunk.start, 1, chunk.block_ids) for chunk in chunks])
        token_ids = [chunk.token_ids[0] for chunk in chunks]
        bucket.token_ids[0, : len(chunks)].copy_(torch.tensor(token_ids))
        # A copy: the next replay writes over what this one answers.
        return bucket.replay()[: len(chunks)].clone()

    def _bucket(self, num_rows: int, length: int) -> _Bucket:
        rows = next(size for size in ROW_BUCKETS if size >= num_rows)
        positions = FIRST_LENGTH
        while positions < length:
            positions *= LENGTH_STEP
        positions = min(positions, self._max_length)
        made = self._buckets.get((rows, positions))
        if made is None:
            made = self._buckets[rows, positions] = self._make(rows, positions)
            log.info("decode graph: %d rows of up to %d positions", rows, positions)
        return made

    def _make(self, rows: int, positions: int) -> _Bucket:
        plan = self._make_plan(rows, positions, self._pool.block_size, self._device)
        token_ids = torch.zeros(1, rows, dtype=torch.int64, device=self._device)

        def run() -> Tensor:
            frame = PagedFrame(self._pool, plan, self._backend, None)
            with entered(frame):
                output = self._module(input_ids=token_ids, position_ids=plan.positions[None], use_cache=False)
            if frame.num_calls != self._pool.layout.num_layers:
                raise InternalError(
                    f"{frame.num_calls} attention calls in a forward, {self._pool.layout.num_layers} at load"
                )
            logits: Tensor = output.logits[0]
            return logits

        return _Bucket(token_ids, plan, self._capture(run))
