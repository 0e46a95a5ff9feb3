"""The wire form: the formula's bytes, and back into other slots."""

import pytest
import torch
from torch import Tensor

from pdserve.kernels.wire_pack import pack_layers, pack_layers_reference, unpack_layers


def caches_of(dtype: torch.dtype, num_slots: int) -> list[tuple[Tensor, Tensor]]:
    """Three layers, of which one has another shape, as in gemma4."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(3, 8, 8), (1, 16, 4), (3, 8, 8)]
    return [
        (
            torch.randn(num_slots, heads, key, generator=generator).to(dtype),
            torch.randn(num_slots, heads, value, generator=generator).to(dtype),
        )
        for heads, key, value in shapes
    ]


def num_bytes(caches: list[tuple[Tensor, Tensor]], tokens: int) -> int:
    return tokens * sum(cache[0].numel() * cache.element_size() for pair in caches for cache in pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slots", [[0], [7, 3, 12], [5, 6, 7, 8, 0, 1]])
def test_pack_writes_the_formulas_bytes_and_unpack_restores_them(dtype: torch.dtype, slots: list[int]) -> None:
    caches = caches_of(dtype, 20)
    room = bytearray(b"\xaa" * (num_bytes(caches, len(slots)) + 2))
    pack_layers(caches, torch.tensor(slots), memoryview(room)[1:-1])
    assert bytes(room[1:-1]) == pack_layers_reference(caches, torch.tensor(slots))
    assert room[0] == room[-1] == 0xAA
    others = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in caches]
    elsewhere = torch.arange(19, 19 - len(slots), -1)
    unpack_layers(others, elsewhere, memoryview(bytes(room[1:-1])))
    for pair, other in zip(caches, others, strict=True):
        for cache, copy in zip(pair, other, strict=True):
            assert torch.equal(copy[elsewhere], cache[slots])
            assert not copy[: 20 - len(slots)].any()


def test_wrong_sizes_are_refused() -> None:
    caches = caches_of(torch.float32, 4)
    size = num_bytes(caches, 2)
    for wrong in (size - 1, size + 1, 0):
        with pytest.raises(ValueError, match=f"is {size} bytes, not {wrong}"):
            pack_layers(caches, torch.tensor([0, 1]), memoryview(bytearray(wrong)))
        with pytest.raises(ValueError, match=f"is {size} bytes, not {wrong}"):
            unpack_layers(caches, torch.tensor([0, 1]), memoryview(bytes(wrong)))


def test_no_tokens_are_no_bytes() -> None:
    pack_layers(caches_of(torch.float32, 4), torch.tensor([], dtype=torch.int64), memoryview(bytearray()))
