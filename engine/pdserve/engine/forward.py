"""One forward pass of the model over a ragged step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.core.errors import InternalError
from pdserve.engine.attention import PagedFrame, entered
from pdserve.engine.batch import SequenceChunk
from pdserve.engine.decode_graphs import DecodeGraphs
from pdserve.engine.kv_pool import TORCH_DTYPES, KvPool
from pdserve.kernels.backends import Backend
from pdserve.kernels.ragged import ChunkRows


class Forward:
    """The model on a pool. `num_forwards` counts passes: one per step, whatever the step holds."""

    def __init__(
        self,
        module: torch.nn.Module,
        pool: KvPool,
        backend: Backend,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._module = module
        self._pool = pool
        self._backend = backend
        self._device = device
        self._graphs = graphs
        self._dtype = TORCH_DTYPES[pool.layout.dtype]
        self.num_forwards = 0

    @torch.inference_mode()
    def logits(
        self,
        chunks: Sequence[SequenceChunk],
        kept_rows: Sequence[Sequence[int]],
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run all chunks at once; return the logits [kept rows, vocabulary] of those rows that each chunk keeps.

        The model computes no others: row i of a chunk is the one of its i-th token.

        `on_layer(l)` is called when layer l's keys and values lie in the pool, before the next layer runs.
        """
        if self._graphs is not None and on_layer is None and self._graphs.serves(chunks, kept_rows):
            self.num_forwards += 1
            return self._graphs.logits(chunks)
        plan = self._backend.plan(rows_of(chunks), self._pool.block_size, self._dtype, self._device)
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        frame = PagedFrame(self._pool, plan, self._backend, on_layer)
        with entered(frame):
            output = self._module(
                input_ids=torch.tensor([token_ids], device=self._device),
                position_ids=plan.positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor(kept_places(chunks, kept_rows), dtype=torch.int64, device=self._device),
            )
        self.num_forwards += 1
        if frame.num_calls != self._pool.layout.num_layers:
            raise InternalError(
                f"{frame.num_calls} attention calls in a forward, {self._pool.layout.num_layers} at load"
            )
        logits: Tensor = output.logits[0]
        return logits


def rows_of(chunks: Sequence[SequenceChunk]) -> list[ChunkRows]:
    """Return the chunks as their backend's plan wants them."""
    return [ChunkRows(chunk.start, len(chunk.token_ids), chunk.block_ids) for chunk in chunks]


def kept_places(chunks: Sequence[SequenceChunk], kept_rows: Sequence[Sequence[int]]) -> list[int]:
    """Return where in the step the rows lie that each chunk keeps."""
    places, first = list[int](), 0
    for chunk, kept in zip(chunks, kept_rows, strict=True):
        places += [first + row for row in kept]
        first += len(chunk.token_ids)
    return places
