"""The operations on device tensors, at the shapes and against the references of the native check."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pdserve.core.work import Sampling
from pdserve.kernels import philox
from pdserve.kernels.kv_write import write_kv_reference
from pdserve.kernels.logits import Chosen, SampledRow
from pdserve.kernels.paged_attention import paged_attention_reference
from pdserve.kernels.sampling import sample
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.gumbel_max import uniform
from pdserve.kernels.triton.kv_quantize import quantize_reference, write_quantized_kv
from pdserve.kernels.triton.paged_attention import paged_attention
from pdserve.kernels.triton.rms_norm import rms_norm, rms_norm_reference
from pdserve.kernels.triton.rope import rotate, rotate_reference
from pdserve.kernels.triton.silu_mul import silu_mul, silu_mul_reference
from pdserve.kernels.triton_backend import BACKEND, TritonPlan, attend, draw_rows
from pdserve.kernels.wire_pack import pack_layers_reference
from tests.kernels.native.shapes import SHAPES, TOLERANCE, caches_of, chunks_of, one_byte_of

SPANS = [(0, 1), (36, 1), (0, 5), (17, 23), (511, 1), (100, 300)]
ROUNDING = 2.0
"""Matrix units of a device sum in another order than the reference: tolerances of the native check times this."""
VOCABULARY = 128256
WIDTH = 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STORED = (torch.int8, torch.float8_e4m3fn)

Check = Callable[[], tuple[bool, str]]
"""Whether an operation is right, and what was seen."""


def check_operations(device: torch.device) -> Iterator[str]:
    """Yield a line per operation and shape, each beginning with `ok` or `WRONG`; one that raises is wrong, and the rest runs."""
    for name, check in _checks(device):
        try:
            is_right, seen = check()
        except Exception as error:  # noqa: BLE001 - whatever one operation raises, the others are to be seen
            first_line = str(error).strip().partition("\n")[0]
            is_right, seen = False, f"{type(error).__name__}: {first_line}"
        yield f"{'ok' if is_right else 'WRONG'}: {name}{': ' if seen else ''}{seen}"


def _checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    for name in SHAPES:
        yield f"attention {name}", partial(_attention, name, device)
        yield f"KV write {name}", partial(_writing, name, device)
        yield f"wire form {name}", partial(_wire, name, device)
    for stored in STORED:
        yield f"write into {stored}", partial(_one_byte_write, stored, device)
        yield f"attention over {stored}", partial(_one_byte, stored, device)
    for dtype in FLOATS:
        yield f"fused operations {dtype}", partial(_fused, dtype, device)
    yield "uniforms", partial(_uniforms, device)
    yield "draws", partial(_draws, device)


def _attention(name: str, device: torch.device) -> tuple[bool, str]:
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
    return _close(out, expected)


def _writing(name: str, device: torch.device) -> tuple[bool, str]:
    torch.manual_seed(1)
    shape = SHAPES[name]
    keys, values = caches_of(shape)
    slots = torch.randperm(keys.shape[0])[:37]
    new = torch.randn(37, shape.kv_heads, shape.dim).to(shape.dtype)
    expected = write_kv_reference(keys, values, new, new, slots)
    written = (keys.to(device), values.to(device))
    BACKEND.write_kv(*written, new.to(device), new.to(device), slots.to(device))
    return all(
        torch.equal(a.cpu().nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(written, expected, strict=True)
    ), ""


def _wire(name: str, device: torch.device) -> tuple[bool, str]:
    torch.manual_seed(2)
    layers = [caches_of(SHAPES[name]) for _ in range(2)]
    slots = torch.randperm(layers[0][0].shape[0])[:53]
    expected = pack_layers_reference(layers, slots)
    wire = bytearray(len(expected))
    BACKEND.pack([(keys.to(device), values.to(device)) for keys, values in layers], slots.to(device), memoryview(wire))
    target = [(torch.zeros_like(k, device=device), torch.zeros_like(v, device=device)) for k, v in layers]
    BACKEND.unpack(target, slots.to(device), memoryview(wire))
    placed = pack_layers_reference([(keys.cpu(), values.cpu()) for keys, values in target], slots)
    return bytes(wire) == expected == placed, ""


def _one_byte_write(stored: torch.dtype, device: torch.device) -> tuple[bool, str]:
    """Scales are equal; of the numbers all but a few, which lie on a border of the rounding."""
    torch.manual_seed(3)
    new, slots = torch.randn(6, 8, 128), torch.tensor([9, 0, 30, 17, 2, 31])
    numbers = torch.zeros(2, 32, 8, 128, dtype=stored, device=device)
    scales = torch.zeros(2, 32, 8, device=device)
    cache = PagedCache(numbers[0], numbers[1], 16, scales[0], scales[1])
    write_quantized_kv(cache, new.to(device), new.to(device), slots.to(device))
    expected, expected_scales = quantize_reference(new, stored)
    equal = float((numbers[0].cpu().view(torch.uint8)[slots] == expected.view(torch.uint8)).float().mean())
    return equal > 0.99 and torch.allclose(scales[0].cpu()[slots], expected_scales), f"{equal:.1%} equal"


def _one_byte(stored: torch.dtype, device: torch.device) -> tuple[bool, str]:
    torch.manual_seed(4)
    shape = replace(SHAPES["llama-8b"], block_size=32)
    chunks = chunks_of(shape, SPANS)
    cache, meant = one_byte_of(shape, stored)
    query = torch.randn(sum(chunk.num_rows for chunk in chunks), shape.heads, shape.dim).to(shape.dtype)
    expected = paged_attention_reference(
        *(query, *meant, chunks, shape.block_size), window=None, scaling=0.1, softcap=None, sinks=None
    )
    plan = TritonPlan(chunks, shape.block_size, shape.dtype, device)
    assert cache.key_scales is not None and cache.value_scales is not None
    there = PagedCache(
        *(cache.keys.to(device), cache.values.to(device), shape.block_size),
        *(cache.key_scales.to(device), cache.value_scales.to(device)),
    )
    out = paged_attention(query.to(device), there, plan.paged, window=None, scaling=0.1, softcap=None, sinks=None)
    return _close(out, expected)


def _fused(dtype: torch.dtype, device: torch.device) -> tuple[bool, str]:
    torch.manual_seed(5)
    x, up, residual = (torch.randn(33, WIDTH).to(dtype) for _ in range(3))
    weight = torch.randn(WIDTH).to(dtype)
    heads, angles = torch.randn(33, 32, 128).to(dtype), torch.rand(33, 128)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = (*rms_norm_reference(x, weight, 1e-5, residual=residual), rotate_reference(heads, cos, sin))
    stream, rotated = residual.to(device), heads.to(device)
    normal = rms_norm(x.to(device), weight.to(device), 1e-5, residual=stream)
    rotate(rotated, cos.to(device), sin.to(device))
    gated = silu_mul(x.to(device), up.to(device))
    pairs = zip((normal, stream, rotated, gated), (*expected, silu_mul_reference(x, up)), strict=True)
    # Numbers are up to about 16 here, where those of attention are about 1.
    error = max(float((ours.cpu().float() - theirs.float()).abs().max()) for ours, theirs in pairs)
    return error <= 8 * TOLERANCE[dtype], f"largest error {error:.2g}"


def _uniforms(device: torch.device) -> tuple[bool, str]:
    """Bit by bit those of NumPy."""
    seeds, positions, sequences = (7, 2**63 - 5), (3, 4000), (0, 2)
    found = uniform(
        torch.tensor(seeds, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        torch.tensor(sequences, dtype=torch.int32, device=device),
        VOCABULARY,
    ).cpu()
    ids = np.arange(VOCABULARY)
    same = [
        np.array_equal(found[row].numpy(), philox.uniform(seeds[row], ids, positions[row], sequences[row]))
        for row in range(2)
    ]
    return all(same), ""


def _draws(device: torch.device) -> tuple[bool, str]:
    """The tokens of the host's draw, without filters and with each of them: from the list that a device makes, and beyond it."""
    logits = 3 * torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(6))
    filters = ((0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.9, 0.05))
    rows = [
        SampledRow(Sampling((0.0, 0.5, 1.0, 2.0)[n % 4], *filters[n % 5], seed=2**64 - 1 - n), n % 3, n)
        for n in range(64)
    ]
    ours, theirs = sample(logits.to(device), rows, draw_rows), sample(logits, rows)
    wrong = sum(
        not (isinstance(a, Chosen) and isinstance(b, Chosen) and a.token_id == b.token_id)
        for a, b in zip(ours, theirs, strict=True)
    )
    return wrong == 0, f"{wrong} of {len(rows)} differ from the host's"


def _close(ours: Tensor, expected: Tensor) -> tuple[bool, str]:
    error = float((ours.cpu().float() - expected.float()).abs().max())
    return error <= ROUNDING * TOLERANCE[ours.dtype], f"largest error {error:.2g}"
