"""A forward pass as a list of operations on named activations, run by the native library in one call.

A `Tape` is written once, at load: `activation` makes a buffer of a width, the other methods append an operation each. `run` then
computes a step: all operations, or, where layers are to be reported, as many calls as there are reports. Activations are float32
rows in memory of the tape; those that only products read may be bfloat16. The memory grows with the longest step seen.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.native.library import NativeLibrary
from pdserve.kernels.native.product import PackedWeight
from pdserve.kernels.native.structures import (
    Activation,
    AttentionStruct,
    CacheFormat,
    ChunkStruct,
    NormStruct,
    OperationKind,
    OperationStruct,
    RotationStruct,
    StepStruct,
    WeightFormat,
)
from pdserve.kernels.ragged import ChunkRows

MAX_HEAD_DIM = 256
LEAST_ROWS = 32
CACHE_FORMATS = {
    torch.float32: CacheFormat.F32,
    torch.float16: CacheFormat.F16,
    torch.bfloat16: CacheFormat.BF16,
}


@dataclass(eq=False)
class Rows:
    """An activation: a row of `width` numbers per new token, or, if `of_kept`, per row whose logits are wanted."""

    width: int
    dtype: torch.dtype
    of_kept: bool
    memory: Tensor = field(default_factory=lambda: torch.empty(0))

    def columns(self, first: int) -> "Place":
        """Return the place `first` numbers into each row."""
        return Place(self, first)


@dataclass(frozen=True)
class Place:
    """Where an operation reads or writes in an activation."""

    rows: Rows
    first: int = 0


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding: pairs (i, i + pairs), or (2i, 2i + 1) if interleaved, turn by position * frequencies[i]."""

    frequencies: Tensor
    scaling: float
    is_interleaved: bool = False


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's paged attention, as `paged_attention` describes it; caches are [slots, kv_heads, dim]."""

    key_cache: Tensor
    value_cache: Tensor
    block_size: int
    num_heads: int
    window: int | None
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """[heads], float32, contiguous."""


class TapeStep:
    """What a step is about, in the form that C reads. Chunks have their block tables here; nothing is kept of them elsewhere."""

    def __init__(
        self,
        token_ids: Sequence[int],
        chunks: Sequence[ChunkRows],
        kept: Sequence[int],
        block_size: int,
    ) -> None:
        tables = [np.asarray(chunk.block_ids, np.int32) for chunk in chunks]
        self.chunks = (ChunkStruct * max(len(chunks), 1))()
        first_row = 0
        for struct, chunk, table in zip(self.chunks, chunks, tables, strict=False):
            if len(table) * block_size < chunk.stop:
                raise ValueError(f"{chunk.stop} positions, but a table of {len(table)} blocks")
            struct.block_ids, struct.start = table.ctypes.data, chunk.start
            struct.num_rows, struct.first_row = chunk.num_rows, first_row
            first_row += chunk.num_rows
        self.num_rows = first_row
        self.num_kept = len(kept)
        ids, rows = np.asarray(token_ids, np.int32), np.asarray(kept, np.int32)
        self._arrays: list[NDArray[Any]] = [ids, rows, *tables]
        self.struct = StepStruct(
            ids.ctypes.data, rows.ctypes.data, ctypes.addressof(self.chunks), first_row, len(kept), len(chunks)
        )


class Tape:
    """Operations in order. One owner; `run` belongs to one thread at a time. `close` ends its threads."""

    def __init__(self, library: NativeLibrary, num_threads: int = 1) -> None:
        self._c = library.c
        self._team = library.new_team(num_threads)
        self._end = weakref.finalize(self, library.c.team_free, self._team)
        self._activations: list[Rows] = []
        self._written: list[tuple[OperationStruct, Place | None, Place | None]] = []
        self._kept_alive: list[object] = []
        self._array: ctypes.Array[OperationStruct] | None = None
        self._room = {False: 0, True: 0}

    def __len__(self) -> int:
        return len(self._written)

    def activation(self, width: int, dtype: torch.dtype = torch.float32, *, of_kept: bool = False) -> Rows:
        """Return a new activation of `width` numbers a row."""
        made = Rows(width, dtype, of_kept)
        self._activations.append(made)
        return made

    def embed(self, weight: PackedWeight, y: Rows, factor: float = 1.0) -> None:
        """Append y = factor * the weight's rows of the tokens."""
        self._append(OperationKind.EMBED, None, Place(y), weight=weight, factor=factor)

    def keep(self, x: Rows, y: Rows) -> None:
        """Append y = the rows of x that are kept; y is `of_kept`."""
        self._append(OperationKind.KEEP, Place(x), Place(y), width=x.width)

    def norm(
        self,
        x: Place,
        y: Place,
        scale: Tensor,
        epsilon: float,
        *,
        bias: Tensor | None = None,
        num_heads: int = 1,
        is_centered: bool = False,
        adds: bool = False,
    ) -> None:
        """Append y = norm(x), or y += norm(x) if it `adds`: of the first numbers of each row, `num_heads` times len(scale)."""
        scale = scale.detach().float().contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        self._kept_alive += [scale, bias]
        struct = NormStruct(
            scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            epsilon,
            num_heads,
            scale.numel(),
            is_centered,
            adds,
        )
        self._append(OperationKind.NORM, x, y, norm=struct)

    def product(self, x: Place, y: Place, weight: PackedWeight, *, adds: bool = False) -> None:
        """Append y = x times the weight, plus its bias; plus y if it `adds`."""
        if x.rows.dtype != weight.x_dtype or x.first + weight.x_width > x.rows.width:
            raise ValueError(
                f"a product of {weight.weight_format.name} cannot read rows of {x.rows.dtype}, {x.rows.width} wide"
            )
        self._append(OperationKind.PRODUCT, x, y, weight=weight, adds=adds)

    def angles(self, rotation: Rotation, y: Rows) -> None:
        """Append y = cosines and sines of the rows' positions; y is as wide as two frequencies' tensors."""
        self._append(OperationKind.ANGLES, None, Place(y), rotation=self._rotation(rotation, 0, 0))

    def rotate(self, rotation: Rotation, x: Place, angles: Rows, num_heads: int, head_dim: int) -> None:
        """Append: the heads of x turn by the angles, in place."""
        self._append(OperationKind.ROTATE, x, Place(angles), rotation=self._rotation(rotation, num_heads, head_dim))

    def write(self, keys: Place, values: Place, layer: AttentionLayer) -> None:
        """Append: keys and values, of one activation, go to the layer's cache."""
        if keys.rows is not values.rows:
            raise ValueError("keys and values stand in one activation")
        self._append(OperationKind.WRITE, keys, values, attention=self._attention(layer))

    def attend(self, query: Place, y: Place, layer: AttentionLayer) -> None:
        """Append y = attention of the rows' queries over the layer's cache."""
        self._append(OperationKind.ATTEND, query, y, attention=self._attention(layer))

    def activate(self, activation: Activation, x: Place, y: Place, width: int, *, is_gated: bool) -> None:
        """Append y = f(x), or f(x) times the next `width` numbers of the row if it is gated."""
        self._append(OperationKind.ACTIVATE, x, y, width=width, activation=activation, is_gated=is_gated)

    def scale(self, x: Rows, factor: float, cap: float | None) -> None:
        """Append x = factor * x, softly capped at `cap`, in place."""
        self._append(OperationKind.SCALE, Place(x), None, width=x.width, factor=factor, cap=cap or 0.0)

    def run(self, step: TapeStep, reports: Sequence[tuple[int, Callable[[], None]]] = ()) -> None:
        """Compute the step. Each report, a number of operations and a function, is called when so many are done, in order."""
        array = self._ready(step)
        begun = 0
        for end, report in reports:
            self._c.tape_run(self._team, array, begun, end, ctypes.byref(step.struct))
            report()
            begun = end
        if begun < len(self._written):
            self._c.tape_run(self._team, array, begun, len(self._written), ctypes.byref(step.struct))

    def close(self) -> None:
        """End the threads. The tape cannot run again."""
        self._end()

    def _ready(self, step: TapeStep) -> "ctypes.Array[OperationStruct]":
        """Make room for the step's rows; write the operations down anew where that moved activations."""
        if not self._end.alive:
            raise ValueError("the tape is closed")
        wanted = {False: step.num_rows, True: step.num_kept}
        if self._array is not None and all(wanted[kind] <= self._room[kind] for kind in wanted):
            return self._array
        for kind, rows in wanted.items():
            if rows > self._room[kind] or self._array is None:
                self._room[kind] = max(LEAST_ROWS, 1 << (rows - 1).bit_length() if rows else 0)
        for activation in self._activations:
            activation.memory = torch.zeros(self._room[activation.of_kept], activation.width, dtype=activation.dtype)
        self._array = (OperationStruct * len(self._written))()
        for index, (struct, x, y) in enumerate(self._written):
            for name, place in (("x", x), ("y", y)):
                if place is not None:
                    memory = place.rows.memory
                    setattr(struct, name, memory.data_ptr() + place.first * memory.element_size())
                    setattr(struct, f"{name}_stride", place.rows.width)
            self._array[index] = struct
        return self._array

    def _append(self, kind: OperationKind, x: Place | None, y: Place | None, **fields: object) -> None:
        weight = fields.pop("weight", None)
        struct = OperationStruct(kind=kind, **fields)
        if isinstance(weight, PackedWeight):
            self._kept_alive.append(weight)
            struct.weight = weight.struct()
        target = y if y is not None else x
        assert target is not None
        struct.of_kept = target.rows.of_kept
        struct.rounds = target.rows.dtype == torch.bfloat16
        self._written.append((struct, x, y))
        self._array = None

    def _attention(self, layer: AttentionLayer) -> AttentionStruct:
        self._kept_alive.append(layer)
        return attention_struct(layer)

    def _rotation(self, rotation: Rotation, num_heads: int, head_dim: int) -> RotationStruct:
        frequencies = rotation.frequencies.detach().float().contiguous()
        self._kept_alive.append(frequencies)
        return RotationStruct(
            frequencies.data_ptr(),
            rotation.scaling,
            num_heads,
            head_dim,
            frequencies.numel(),
            rotation.is_interleaved,
        )


def attention_struct(layer: AttentionLayer) -> AttentionStruct:
    """Return a layer's attention for C; valid as long as the layer's tensors. ValueError for heads that are too large."""
    key_dim, value_dim = layer.key_cache.shape[2], layer.value_cache.shape[2]
    if max(key_dim, value_dim) > MAX_HEAD_DIM:
        raise ValueError(f"heads of {max(key_dim, value_dim)} dims; at most {MAX_HEAD_DIM} are computed natively")
    return AttentionStruct(
        layer.key_cache.data_ptr(),
        layer.value_cache.data_ptr(),
        None if layer.sinks is None else layer.sinks.data_ptr(),
        CACHE_FORMATS[layer.key_cache.dtype],
        layer.block_size,
        layer.num_heads,
        layer.key_cache.shape[1],
        key_dim,
        value_dim,
        layer.window or 0,
        layer.scaling,
        layer.softcap or 0.0,
    )


def weight_format_for(dtype: torch.dtype, library: NativeLibrary) -> WeightFormat:
    """Return the format in which weights of a model of this dtype are multiplied."""
    if dtype == torch.float32:
        return WeightFormat.F32
    if dtype == torch.float16:
        return WeightFormat.F16
    return WeightFormat.BF16_DOT if library.has_bf16_dot else WeightFormat.BF16
