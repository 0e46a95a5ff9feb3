"""The engine: one model, one pool, one forward pass per step."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from pdserve.core.errors import ConfigError, InternalError
from pdserve.core.identity import Capabilities, Identity
from pdserve.core.layout import DTYPE_BYTES, KvLayout, num_blocks_for
from pdserve.core.work import TokenScore
from pdserve.engine.batch import ChunkResult, SequenceChunk, StepResult
from pdserve.engine.forwards import choose_forward
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.loading import LoadedModel, load_model
from pdserve.engine.native_model import NativeForward
from pdserve.engine.probe import check_isolation, discover
from pdserve.engine.support import kv_fields, served_length
from pdserve.kernels.backends import choose_backend
from pdserve.kernels.sampling import log_probabilities, sample

log = logging.getLogger(__name__)

SCORED_AT_ONCE = 32


class Engine:
    """A model on a paged KV pool.

    `step` belongs to one thread at a time; `pack` and `unpack` may be called from others meanwhile, on slots that the running
    step does not write (leases and layer reports see to that). Blocks are counted by `blocks.BlockPool`, not here.
    """

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
        block_size: int = 16,
        num_blocks: int,
        max_model_len: int | None = None,
        attention_backend: str | None = None,
    ) -> "Engine":
        """Read the model folder, check that the engine can serve it, and allocate the pool.

        `dtype` is float32, bfloat16 or float16, of weights, computation and KV; `attention_backend` one of `backends`, None
        for the device's own. Raises ConfigError, ModelUnavailable or
        ModelUnsupported.
        """
        faults = [f"{name}: {value} is below 1" for name, value in _sizes(threads, block_size, num_blocks) if value < 1]
        if dtype not in DTYPE_BYTES:
            faults.append(f"dtype: {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if faults:
            raise ConfigError(faults)
        torch.set_num_threads(threads)
        model = load_model(model_dir, dtype, torch.device(device))
        return cls(
            model,
            dtype=dtype,
            device=device,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            threads=threads,
        )

    def __init__(
        self,
        model: LoadedModel,
        *,
        dtype: str,
        device: str,
        block_size: int,
        num_blocks: int,
        max_model_len: int | None = None,
        attention_backend: str | None = None,
        threads: int = 1,
    ) -> None:
        where = torch.device(device)
        backend = choose_backend(where.type, attention_backend)
        if backend.fuse is not None:
            backend.fuse(model.module)
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.attention_backend = backend.name
        self.eos_token_ids = model.eos_token_ids
        self.vocab_size = model.vocab_size
        self.max_model_len = served_length(model.config, max_model_len)
        with _current(where):
            found = discover(
                model.module, model.architecture, model.num_layers, model.vocab_size, dtype, backend, where
            )
            self.layout: KvLayout = found.layout
            check_isolation(model.module, model.architecture, self.layout, model.vocab_size, backend, where)
        self.identity = Identity(
            weight_digest=model.weight_digest,
            architecture=model.architecture,
            kv_fields=kv_fields(model.config, self.layout),
            tokenizer_digest=model.tokenizer_digest,
        )
        self.capabilities = Capabilities(compute_dtype=dtype, kv_dtype=dtype, wire_dtypes=(dtype,))
        self._where = where
        self._pool = KvPool(self.layout, num_blocks, block_size, where, backend)
        with _current(where):
            self._forward = choose_forward(model, found, self._pool, backend, where, self.max_model_len, threads)
        self._draw_rows, self._summarize = backend.draw_rows, backend.summarize
        self._is_stepping = False
        mebibytes = self._pool.num_bytes / 2**20
        log.info("%s: %d blocks of %d tokens, %.0f MiB of KV", model.architecture, num_blocks, block_size, mebibytes)

    @property
    def forward_pass(self) -> str:
        """Who computes a step: "native" or "transformers"."""
        return "native" if isinstance(self._forward, NativeForward) else "transformers"

    @property
    def num_forwards(self) -> int:
        """Forward passes run so far: one per step."""
        return self._forward.num_forwards

    def step(self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Run all chunks in one forward pass; sample and score where asked.

        `on_layer(l)` is called, in this thread, when layer l's keys and values of this step lie in the pool and before the
        next layer runs. A row that cannot be sampled answers `RowFailed`, the others answer as without it. Logits take
        (rows that sample + ids that are scored) x vocabulary x 4 bytes.
        Raises ValueError for a chunk that does not fit its block table, the pool or the model's length.
        """
        if not chunks:
            return StepResult(())
        with torch.inference_mode(), _current(self._where):
            logits = self._compute(chunks, on_layer)
            rows = [row for chunk in chunks for row in chunk.samples]
            choices = iter(sample(_sampled(logits, chunks), rows, self._draw_rows, self._summarize))
            results, first = list[ChunkResult](), 0
            for chunk in chunks:
                scores = _scores(logits[first : first + len(chunk.scored_ids)], chunk)
                results.append(ChunkResult(tuple(next(choices) for _ in chunk.samples), scores))
                first += len(_kept_rows(chunk))
        return StepResult(tuple(results))

    def logits(self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Do as `step`, but return the logits [rows of `samples`, vocabulary]; draw and score nothing."""
        with torch.inference_mode(), _current(self._where):
            return _sampled(self._compute(chunks, on_layer), chunks).clone()

    def _compute(self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None) -> torch.Tensor:
        for chunk in chunks:
            self._check(chunk)
        if self._is_stepping:
            raise InternalError("a step began while another was running")
        self._is_stepping = True
        try:
            return self._forward.logits(chunks, [_kept_rows(chunk) for chunk in chunks], on_layer)
        finally:
            self._is_stepping = False

    def pack(self, layers: range, block_ids: Sequence[int], positions: range, into: memoryview) -> None:
        """Write the wire form of `positions` of the sequence with that block table, in `layers`, into `into`.

        Size: `layout.range_bytes(layers, len(positions))`; ValueError otherwise.
        """
        with _current(self._where):
            self._pool.pack(layers, self._pool.slots(block_ids, positions), into)

    def unpack(self, layers: range, block_ids: Sequence[int], positions: range, payload: memoryview) -> None:
        """Place wire form where `pack` would read it; ValueError if the size is wrong."""
        with _current(self._where):
            self._pool.unpack(layers, self._pool.slots(block_ids, positions), payload)

    def copy_block(self, source: int, target: int, num_positions: int) -> None:
        """Copy the KV of the first `num_positions` positions of a block to another, in every layer; in the thread of `step`."""
        self._pool.copy_block(source, target, num_positions)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN; for tests, as `BlockPool(num_blocks, on_free=engine.poison)`."""
        self._pool.poison(block_ids)

    def _check(self, chunk: SequenceChunk) -> None:
        stop = chunk.start + len(chunk.token_ids)
        if not chunk.token_ids or chunk.start < 0:
            raise ValueError("a chunk has at least one token, from position 0 on")
        if stop > self.max_model_len:
            raise ValueError(f"position {stop - 1} is beyond the model's length of {self.max_model_len}")
        needed = num_blocks_for(stop, self.block_size)
        if len(chunk.block_ids) < needed:
            raise ValueError(f"{stop} positions need {needed} blocks, the table has {len(chunk.block_ids)}")
        table = chunk.block_ids[:needed]
        if min(table) < 0 or max(table) >= self.num_blocks:
            raise ValueError("a block id lies outside the pool")
        if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= self.vocab_size:
            raise ValueError("a token id lies outside the vocabulary")
        if len(chunk.scored_ids) > len(chunk.token_ids):
            raise ValueError(f"{len(chunk.scored_ids)} ids are to be scored after {len(chunk.token_ids)} tokens")
        if not all(0 <= token < self.vocab_size for token in chunk.scored_ids):
            raise ValueError("a scored id lies outside the vocabulary")


def _current(where: torch.device) -> AbstractContextManager[object]:
    """Make `where` this thread's current device: kernels are launched on that one, wherever their tensors lie."""
    return torch.cuda.device(where) if where.type == "cuda" else nullcontext()


def _kept_rows(chunk: SequenceChunk) -> list[int]:
    """Return the rows whose logits are needed: those before scored ids, and the last one if it is sampled, once."""
    scored, last = len(chunk.scored_ids), len(chunk.token_ids) - 1
    return [*range(scored), last] if chunk.samples and scored <= last else list(range(scored))


def _sampled(logits: torch.Tensor, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
    """Pick the logits [sampled rows, vocabulary] from those of the kept rows; when they are the same, nothing is copied."""
    places, end = list[int](), 0
    for chunk in chunks:
        end += len(_kept_rows(chunk))
        places += [end - 1] * len(chunk.samples)
    return logits if places == list(range(logits.shape[0])) else logits[places]


def _scores(logits: torch.Tensor, chunk: SequenceChunk) -> tuple[TokenScore, ...]:
    """Score the ids from the logits [scored ids, vocabulary] before them, some at a time: each slice is copied on the way."""
    scores: list[TokenScore] = []
    for start in range(0, len(chunk.scored_ids), SCORED_AT_ONCE):
        part = slice(start, start + SCORED_AT_ONCE)
        scores += [
            TokenScore(*score) for score in log_probabilities(logits[part], chunk.scored_ids[part], chunk.num_top)
        ]
    return tuple(scores)


def _sizes(threads: int, block_size: int, num_blocks: int) -> list[tuple[str, int]]:
    return [("threads", threads), ("block_size", block_size), ("num_blocks", num_blocks)]
