"""The shape of a model's KV: what one token position costs in each layer, on the wire and in a pool."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3": 1}
SMALL_DTYPES = ("int8", "float8_e4m3")
"""Only on the wire: each vector of a head has a scale in front, see `kernels.wire_quant`."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """KV shape of one layer. `window` is the sliding window in tokens, or None for full attention."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def first_needed_token(self, num_tokens: int) -> int:
        """Return the first position that the query at position `num_tokens` can still see."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1)


@dataclass(frozen=True)
class KvLayout:
    """KV shape of a whole model, in the dtype that it is stored and sent in.

    Wire form of a layer and token range: K as `[token, kv_head, key_dim]`, then V as `[token, kv_head, value_dim]`,
    contiguous, little-endian.
    """

    layers: tuple[LayerLayout, ...]
    dtype: str

    @property
    def num_layers(self) -> int:
        """Number of layers that own KV."""
        return len(self.layers)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    def on_wire(self, dtype: str) -> "KvLayout":
        """Return the same shape in another dtype."""
        return KvLayout(self.layers, dtype)

    def layer_token_bytes(self, layer: int) -> int:
        """Return bytes of one token position (K and V) in `layer`."""
        return self.bytes_before[layer + 1] - self.bytes_before[layer]

    def range_bytes(self, layers: range, num_tokens: int) -> int:
        """Return bytes of `num_tokens` positions in every layer of `layers`, which are consecutive."""
        return num_tokens * (self.bytes_before[layers.stop] - self.bytes_before[layers.start])

    @cached_property
    def bytes_before(self) -> tuple[int, ...]:
        """Bytes of one token position in the layers before each, and last in all."""
        scales = 2 * SCALE_BYTES if self.dtype in SMALL_DTYPES else 0
        sizes = (
            shape.num_kv_heads * ((shape.key_dim + shape.value_dim) * self.itemsize + scales) for shape in self.layers
        )
        return tuple(accumulate(sizes, initial=0))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token position in all layers."""
        return self.bytes_before[-1]

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window, tokens."""
        return tuple(shape.window for shape in self.layers)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)
