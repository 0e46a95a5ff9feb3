"""The KV of one prompt from one engine to another."""

from collections.abc import Sequence

from pdserve.engine.engine import Engine


def hand_over(
    prompt: tuple[int, ...],
    first_token: int,
    source: Engine,
    source_blocks: Sequence[int],
    sink: Engine,
    sink_blocks: Sequence[int],
) -> None:
    layers, tokens = range(source.layout.num_layers), range(len(prompt))
    wire = bytearray(source.layout.range_bytes(layers, len(tokens)))
    source.pack(layers, source_blocks, tokens, memoryview(wire))
    sink.unpack(layers, sink_blocks, tokens, memoryview(wire))
