"""The forward pass of a known architecture in native code: one call a step, no `transformers` on the way.

Rows are computed as `kernels.native` says, so that what a row gets does not depend on the rows beside it.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from pdserve.engine.batch import SequenceChunk
from pdserve.engine.families import LayerParts, ModelParts, NormParts, RotaryParts
from pdserve.engine.forward import kept_places, rows_of
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.probe import LayerCall
from pdserve.kernels.native.library import NativeLibrary
from pdserve.kernels.native.product import PackedWeight
from pdserve.kernels.native.tape import AttentionLayer, Place, Rotation, Rows, Tape, TapeStep


class NativeForward:
    """A model on a pool, as `forward.Forward` is. `num_forwards` counts passes. One thread at a time."""

    def __init__(
        self,
        parts: ModelParts,
        calls: Sequence[LayerCall],
        pool: KvPool,
        library: NativeLibrary,
        num_threads: int,
    ) -> None:
        writer = _Writer(parts, calls, pool, Tape(library, num_threads))
        self._tape, self._logits, self._written_at = writer.write()
        self._block_size = pool.block_size
        self.num_forwards = 0

    def logits(
        self,
        chunks: Sequence[SequenceChunk],
        kept_rows: Sequence[Sequence[int]],
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run all chunks at once; return the logits [kept rows, vocabulary], which the next call writes over.

        `on_layer(l)` is called when layer l's keys and values lie in the pool, before the next layer runs.
        """
        kept = kept_places(chunks, kept_rows)
        step = TapeStep(
            [token for chunk in chunks for token in chunk.token_ids],
            rows_of(chunks),
            kept,
            self._block_size,
        )
        reports = []
        if on_layer is not None:
            reports = [(end, lambda layer=layer: on_layer(layer)) for layer, end in enumerate(self._written_at)]
        self._tape.run(step, reports)
        self.num_forwards += 1
        return self._logits.memory[: len(kept)]

    def close(self) -> None:
        """End its threads."""
        self._tape.close()


class _Writer:
    """Writes a model's operations down."""

    def __init__(
        self,
        parts: ModelParts,
        calls: Sequence[LayerCall],
        pool: KvPool,
        tape: Tape,
    ) -> None:
        self._parts = parts
        self._calls = calls
        self._pool = pool
        self._tape = tape
        first = parts.layers[0]
        width, x_dtype = parts.embedding.num_inputs, parts.embedding.x_dtype
        self._hidden = tape.activation(width)
        self._normed = tape.activation(width + width % 2, x_dtype)
        self._qkv = tape.activation(max(layer.qkv.num_outputs for layer in parts.layers))
        attended = first.out.num_inputs
        self._attended = tape.activation(attended + attended % 2, x_dtype)
        self._gate_up = tape.activation(first.gate_up.num_outputs)
        inner = first.down.num_inputs
        self._inner = tape.activation(inner + inner % 2, x_dtype)
        self._added = tape.activation(width)
        self._angles: dict[int, Rows] = {}

    def write(self) -> tuple[Tape, Rows, list[int]]:
        """Return the tape, where the logits will be, and after how many operations each layer is in the pool."""
        parts, tape = self._parts, self._tape
        tape.embed(parts.embedding, self._hidden, parts.embed_factor)
        for rotary in parts.rotaries:
            self._angles[id(rotary)] = tape.activation(2 * rotary.frequencies.numel())
            tape.angles(self._rotation(rotary), self._angles[id(rotary)])
        written_at = [self._layer(index, layer) for index, layer in enumerate(parts.layers)]
        kept = tape.activation(self._hidden.width, of_kept=True)
        normed = tape.activation(self._normed.width, self._normed.dtype, of_kept=True)
        logits = tape.activation(parts.head.num_outputs, of_kept=True)
        tape.keep(self._hidden, kept)
        self._norm(kept, normed, parts.norm)
        tape.product(Place(normed), Place(logits), parts.head)
        if parts.logit_cap:
            tape.scale(logits, 1.0, parts.logit_cap)
        return tape, logits, written_at

    def _layer(self, index: int, layer: LayerParts) -> int:
        tape, call = self._tape, self._calls[index]
        keys, values = self._pool.layer(index)
        attention = AttentionLayer(
            keys,
            values,
            self._pool.block_size,
            call.num_heads,
            self._pool.layout.layers[index].window,
            call.scaling,
            call.softcap,
            None if call.sinks is None else call.sinks.detach().float().contiguous(),
        )
        kv_heads, dim = keys.shape[1], keys.shape[2]
        query = Place(self._qkv)
        key = self._qkv.columns(call.num_heads * dim)
        value = self._qkv.columns((call.num_heads + kv_heads) * dim)
        self._norm(self._hidden, self._normed, layer.before_attention)
        tape.product(Place(self._normed), query, layer.qkv)
        self._head_norm(query, layer.query_norm, call.num_heads * dim)
        self._head_norm(key, layer.key_norm, kv_heads * dim)
        if layer.rotary is not None:
            rotation, angles = self._rotation(layer.rotary), self._angles[id(layer.rotary)]
            # Keys stand behind the queries: they are more heads.
            tape.rotate(rotation, query, angles, call.num_heads + kv_heads, dim)
        tape.write(key, value, attention)
        written_at = len(tape)
        tape.attend(query, Place(self._attended), attention)
        self._add(self._attended, layer.out, layer.after_attention)
        self._norm(self._hidden, self._normed, layer.before_mlp)
        tape.product(Place(self._normed), Place(self._gate_up), layer.gate_up)
        inner = layer.down.num_inputs
        tape.activate(self._parts.activation, Place(self._gate_up), Place(self._inner), inner, is_gated=True)
        self._add(self._inner, layer.down, layer.after_mlp)
        return written_at

    def _add(self, x: Rows, linear: PackedWeight, norm: NormParts | None) -> None:
        """Append hidden += norm(linear(x))."""
        if norm is None:
            self._tape.product(Place(x), Place(self._hidden), linear, adds=True)
        else:
            self._tape.product(Place(x), Place(self._added), linear)
            self._norm(self._added, self._hidden, norm, adds=True)

    def _norm(self, x: Rows, y: Rows, norm: NormParts, *, adds: bool = False) -> None:
        self._tape.norm(
            Place(x),
            Place(y),
            norm.scale,
            norm.epsilon,
            bias=norm.bias,
            is_centered=norm.is_centered,
            adds=adds,
        )

    def _head_norm(self, place: Place, norm: NormParts | None, width: int) -> None:
        if norm is not None:
            num_heads = width // norm.scale.numel()
            self._tape.norm(
                place,
                place,
                norm.scale,
                norm.epsilon,
                bias=norm.bias,
                num_heads=num_heads,
                is_centered=norm.is_centered,
            )

    def _rotation(self, rotary: RotaryParts) -> Rotation:
        return Rotation(rotary.frequencies, rotary.scaling, self._parts.is_interleaved)
