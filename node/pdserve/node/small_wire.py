"""KV in 8 bits on the wire (`--kv-wire`): around a node's end of the corridor, so that neither pool nor corridor knows of it."""

from pdserve.core.ids import TransferId
from pdserve.core.layout import KvLayout
from pdserve.kernels.wire_quant import dequantize_wire, quantize_wire
from pdserve.kvtransfer import KvSink, KvSource, LinkSettings


def small_source(inner: KvSource, link: LinkSettings) -> KvSource:
    """Return `inner`, packing in the link's wire dtype."""
    return SmallSource(inner, link.layout, link.wire_dtype) if link.wire_dtype else inner


def small_sink(inner: KvSink, link: LinkSettings) -> KvSink:
    """Return `inner`, taking the link's wire dtype beside its own."""
    return SmallSink(inner, link.layout, link.wire_dtype) if link.wire_dtype else inner


class _Scratch:
    """Plain wire form of one frame, kept between frames. Used by the corridor's thread only."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def view(self, num_bytes: int) -> memoryview:
        """Return `num_bytes`, writable."""
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return memoryview(self._buffer)[:num_bytes]


class SmallSource:
    """A `KvSource` that makes 8-bit numbers of what the inner one packs."""

    def __init__(self, inner: KvSource, layout: KvLayout, wire_dtype: str) -> None:
        self._inner, self._layout, self._wire_dtype = inner, layout, wire_dtype
        self._scratch = _Scratch()

    def pack(self, transfer_id: TransferId, layers: range, tokens: range, into: memoryview) -> None:
        """Write the small wire form; ValueError for KV that is not finite."""
        plain = self._scratch.view(self._layout.range_bytes(layers, len(tokens)))
        self._inner.pack(transfer_id, layers, tokens, plain)
        quantize_wire(plain, self._layout, layers, len(tokens), self._wire_dtype, into)


class SmallSink:
    """A `KvSink` that takes both forms; they are told apart by size, which the link's settings keep different."""

    def __init__(self, inner: KvSink, layout: KvLayout, wire_dtype: str) -> None:
        self._inner, self._layout, self._wire_dtype = inner, layout, wire_dtype
        self._scratch = _Scratch()

    def place(self, transfer_id: TransferId, layers: range, tokens: range, payload: memoryview) -> None:
        """Place plain wire form, or what it was before it was made small, as nearly as 8 bits say."""
        num_bytes = self._layout.range_bytes(layers, len(tokens))
        if len(payload) != num_bytes:
            plain = self._scratch.view(num_bytes)
            dequantize_wire(payload, self._layout, layers, len(tokens), self._wire_dtype, plain)
            payload = plain
        self._inner.place(transfer_id, layers, tokens, payload)
