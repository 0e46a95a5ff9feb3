"""Every operation's own launcher and kernel, run natively at the shapes of real models, against its reference.

Speed, races between programs and the numerics of matrix units are not shown here. Tolerances are those of the type's rounding:
the kernels accumulate in float32, as the references do in float64.
"""

from collections.abc import Iterator

import pytest
import torch

from pdserve.kernels.kv_write import write_kv_reference
from pdserve.kernels.paged_attention import paged_attention_reference
from pdserve.kernels.triton.cache import PagedCache
from pdserve.kernels.triton.paged_attention import paged_attention
from pdserve.kernels.triton.paged_decode import paged_decode
from pdserve.kernels.triton_backend import BACKEND, StaticTritonPlan, TritonPlan, attend
from pdserve.kernels.wire_pack import pack_layers_reference
from tests.kernels.native.lowering import reason_not_here
from tests.kernels.native.on_cpu import triton_on_cpu
from tests.kernels.native.shapes import SHAPES, TOLERANCE, Shape, caches_of, chunks_of, one_byte_of

REASON = reason_not_here()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def native() -> Iterator[None]:
    with triton_on_cpu():
        yield


@pytest.mark.parametrize("name", SHAPES)
def test_attention_of_a_mixed_step(name: str) -> None:
    shape = SHAPES[name]
    torch.manual_seed(0)
    chunks = chunks_of(shape, [(0, 1), (36, 1), (0, 5), (17, 23), (211, 1)])
    keys, values = caches_of(shape)
    query = torch.randn(sum(chunk.num_rows for chunk in chunks), shape.heads, shape.dim).to(shape.dtype)
    sinks = torch.randn(shape.heads) if shape.has_sinks else None
    plan = TritonPlan(chunks, shape.block_size, shape.dtype, CPU)
    window, scaling, softcap = shape.window, shape.dim**-0.5, shape.softcap
    out = attend(query, keys, values, plan, window=window, scaling=scaling, softcap=softcap, sinks=sinks)
    expected = paged_attention_reference(
        *(query, keys, values, chunks, shape.block_size), window=window, scaling=scaling, softcap=softcap, sinks=sinks
    )
    assert (out - expected).abs().max() <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_attention_over_one_byte(stored: torch.dtype) -> None:
    shape = SHAPES["llama-8b"]
    torch.manual_seed(5)
    chunks = chunks_of(shape, [(0, 1), (36, 1), (0, 5), (17, 9), (130, 1)])
    one_byte, meant = one_byte_of(shape, stored)
    query = torch.randn(sum(chunk.num_rows for chunk in chunks), shape.heads, shape.dim).to(shape.dtype)
    plan = TritonPlan(chunks, shape.block_size, shape.dtype, CPU)
    out = paged_attention(query, one_byte, plan.paged, window=None, scaling=0.1, softcap=None, sinks=None)
    expected = paged_attention_reference(
        *(query, *meant, chunks, shape.block_size), window=None, scaling=0.1, softcap=None, sinks=None
    )
    assert (out - expected).abs().max() <= TOLERANCE[shape.dtype]


def test_rows_that_fill_a_captured_graph_change_nothing() -> None:
    shape = SHAPES["smollm2"]
    torch.manual_seed(1)
    chunks = chunks_of(shape, [(0, 1), (130, 1)])
    keys, values = caches_of(shape)
    plan = StaticTritonPlan(4, 256, shape.block_size, CPU)
    plan.fill(chunks_of(shape, [(3, 1), (9, 1), (200, 1), (5, 1)]))
    plan.fill(chunks)
    query = torch.randn(4, shape.heads, shape.dim)
    before = keys.clone()
    new = torch.randn(4, shape.kv_heads, shape.dim)
    BACKEND.write_kv(keys, values, new, new, plan.write_slots)
    slots = [chunk.block_ids[chunk.start // 16] * 16 + chunk.start % 16 for chunk in chunks]
    before[slots] = new[:2]
    assert torch.equal(keys.nan_to_num(7.0), before.nan_to_num(7.0))
    out = attend(query, keys, values, plan, window=None, scaling=0.125, softcap=None, sinks=None)
    expected = paged_attention_reference(
        *(query[:2], keys, values, chunks, shape.block_size), window=None, scaling=0.125, softcap=None, sinks=None
    )
    assert (out[:2] - expected).abs().max() <= TOLERANCE[shape.dtype]
    assert not out[2:].any()


def test_splits_are_merged() -> None:
    """Several splits a sequence, as a GPU has them; here the launcher would choose one."""
    shape = SHAPES["smollm2"]
    torch.manual_seed(4)
    chunks = chunks_of(shape, [(0, 1), (40, 1), (211, 1)])
    keys, values = caches_of(shape)
    query = torch.randn(3, shape.heads, shape.dim)
    rows = TritonPlan(chunks, shape.block_size, shape.dtype, CPU).paged.decode
    assert rows is not None
    out = torch.empty_like(query)
    cache = PagedCache(keys, values, shape.block_size)
    paged_decode(query, cache, rows, out, window=None, scaling=0.125, softcap=None, sinks=None, splits=3)
    expected = paged_attention_reference(
        *(query, keys, values, chunks, shape.block_size), window=None, scaling=0.125, softcap=None, sinks=None
    )
    assert (out - expected).abs().max() <= TOLERANCE[shape.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kv_write(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    shape = Shape(8, 2, 128, dtype)
    keys, values = caches_of(shape, dtype)
    slots = torch.randperm(keys.shape[0])[:37]
    # As a model hands them over: heads before rows.
    new = torch.randn(2, shape.kv_heads, 37, shape.dim).to(dtype).transpose(1, 2)
    expected = write_kv_reference(keys, values, new[0], new[1], slots)
    BACKEND.write_kv(keys, values, new[0], new[1], slots)
    assert torch.equal(keys.nan_to_num(7.0), expected[0].nan_to_num(7.0))
    assert torch.equal(values.nan_to_num(7.0), expected[1].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wire_form(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layers = [caches_of(SHAPES["smollm2"], dtype) for _ in range(3)]
    slots = torch.randperm(layers[0][0].shape[0])[:53]
    expected = pack_layers_reference(layers, slots)
    wire = bytearray(len(expected))
    BACKEND.pack(layers, slots, memoryview(wire))
    assert bytes(wire) == expected
    target = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in layers]
    BACKEND.unpack(target, slots, memoryview(bytes(wire)))
    assert pack_layers_reference(target, slots) == expected
    assert sum(int(cache.count_nonzero()) for pair in target for cache in pair) <= 6 * 53 * 3 * 64
