"""The operations on device tensors, at the shapes and against the references of the native check."""

from dataclasses import replace

import torch

from pdserve.kernels.kv_write import write_kv_reference
from pdserve.kernels.paged_attention import paged_attention_reference
from pdserve.kernels.triton_backend import BACKEND, TritonPlan, attend
from pdserve.kernels.wire_pack import pack_layers_reference
from tests.kernels.native.test_ops import SHAPES as NATIVE_SHAPES
from tests.kernels.native.test_ops import TOLERANCE, Shape, caches_of, chunks_of

SHAPES = NATIVE_SHAPES | {
    "llama-8b": Shape(32, 8, 128, torch.bfloat16),
    "gemma2": Shape(8, 4, 256, torch.bfloat16, window=128, softcap=50.0),
}

SPANS = [(0, 1), (36, 1), (0, 5), (17, 23), (511, 1), (100, 300)]
ROUNDING = 2.0
"""Matrix units of a device sum in another order than the reference: tolerances of the native check times this."""


def check_operations(device: torch.device) -> list[str]:
    """Return a line per operation and shape, each beginning with `ok` or `WRONG`."""
    return [line for name in SHAPES for line in (_attention(name, device), _writing(name, device), _wire(name, device))]


def _attention(name: str, device: torch.device) -> str:
    torch.manual_seed(0)
    shape = replace(SHAPES[name], block_size=32)
    chunks = chunks_of(shape, SPANS)
    keys, values = caches_of(shape)
    query = torch.randn(sum(chunk.num_rows for chunk in chunks), shape.heads, shape.dim).to(shape.dtype)
    sinks = torch.randn(shape.heads) if shape.has_sinks else None
    window, scaling, softcap = shape.window, shape.dim**-0.5, shape.softcap
    expected = paged_attention_reference(
        *(query, keys, values, chunks, shape.block_size), window=window, scaling=scaling, softcap=softcap, sinks=sinks
    )
    plan = TritonPlan(chunks, shape.block_size, shape.dtype, device)
    sinks = None if sinks is None else sinks.to(device)
    query, keys, values = query.to(device), keys.to(device), values.to(device)
    out = attend(query, keys, values, plan, window=window, scaling=scaling, softcap=softcap, sinks=sinks)
    error = float((out.cpu().float() - expected.float()).abs().max())
    return _line(error <= ROUNDING * TOLERANCE[shape.dtype], f"attention {name}: largest error {error:.2g}")


def _writing(name: str, device: torch.device) -> str:
    torch.manual_seed(1)
    shape = SHAPES[name]
    keys, values = caches_of(shape)
    slots = torch.randperm(keys.shape[0])[:37]
    new = torch.randn(37, shape.kv_heads, shape.dim).to(shape.dtype)
    expected = write_kv_reference(keys, values, new, new, slots)
    written = (keys.to(device), values.to(device))
    BACKEND.write_kv(*written, new.to(device), new.to(device), slots.to(device))
    same = all(torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(written, expected, strict=True))
    return _line(same, f"KV write {name}")


def _wire(name: str, device: torch.device) -> str:
    torch.manual_seed(2)
    layers = [caches_of(SHAPES[name]) for _ in range(2)]
    slots = torch.randperm(layers[0][0].shape[0])[:53]
    expected = pack_layers_reference(layers, slots)
    wire = bytearray(len(expected))
    BACKEND.pack([(keys.to(device), values.to(device)) for keys, values in layers], slots.to(device), memoryview(wire))
    target = [(torch.zeros_like(k, device=device), torch.zeros_like(v, device=device)) for k, v in layers]
    BACKEND.unpack(target, slots.to(device), memoryview(bytes(wire)))
    placed = pack_layers_reference([(keys.cpu(), values.cpu()) for keys, values in target], slots)
    return _line(bytes(wire) == expected == placed, f"wire form {name}")


def _line(is_right: bool, text: str) -> str:
    return f"{'ok' if is_right else 'WRONG'}: {text}"
