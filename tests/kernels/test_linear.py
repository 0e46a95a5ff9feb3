"""Packed linear layers compute what the plain ones do, and still tell their weight."""

import copy

import pytest
import torch
from torch import nn

from pdserve.kernels.linear import PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("inside", "outside"), [(1, 1), (7, 13), (64, 64), (576, 192), (33, 1000)])
@pytest.mark.parametrize("rows", [(1, 1), (1, 5), (3, 17), (130,), (0,)])
def test_equals_the_plain_layer(has_bias: bool, inside: int, outside: int, rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(inside)
    plain = nn.Linear(inside, outside, bias=has_bias)
    x = torch.randn(*rows, inside, generator=generator)
    with torch.inference_mode():
        expected, ours = plain(x), PackedLinear(plain)(x)
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.special = nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(self.special(x))
        return y


@needs_onednn
def test_a_model_is_packed_throughout_and_a_tied_embedding_keeps_its_weight() -> None:
    plain = Tied().eval()
    packed = copy.deepcopy(plain)
    assert pack_linears(packed) == 3
    assert pack_linears(packed) == 0
    ids = torch.arange(11)[None]
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids), plain(ids), atol=1e-5, rtol=1e-5)
    assert torch.equal(packed.embedding.weight, plain.embedding.weight)
    assert type(packed.special) is nn.modules.linear.NonDynamicallyQuantizableLinear


@needs_onednn
@pytest.mark.parametrize(("inside", "outside"), [(4, 6), (576, 192), (33, 1000)])
def test_the_weight_can_still_be_read(inside: int, outside: int) -> None:
    plain = nn.Linear(inside, outside)
    assert torch.equal(PackedLinear(plain).weight, plain.weight)


def test_only_where_it_pays() -> None:
    assert not can_pack(CPU, torch.bfloat16)
    assert not can_pack(torch.device("meta"), torch.float32)
