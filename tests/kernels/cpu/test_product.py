"""Native products against float64, over odd shapes; and the promise that a row's result does not depend on the rows beside it."""

import pytest
import torch
from torch import Tensor

from pdserve.kernels.native.library import NativeLibrary
from pdserve.kernels.native.product import PackedWeight, pack_weight, product_reference, unpack_weight
from pdserve.kernels.native.structures import WeightFormat
from pdserve.kernels.native.tape import Place, Tape, TapeStep
from pdserve.kernels.ragged import ChunkRows
from tests.kernels.cpu.libraries import every_library, every_product

SHAPES = [(1, 1), (32, 64), (33, 7), (31, 128), (100, 300), (64, 1537), (200, 33)]
"""Outputs and inputs: no multiple of a panel, of a pair, of what is gone through in one part."""
ROWS = [1, 2, 3, 5, 12, 13, 24, 25, 96, 97, 130]
"""Around the heights of tiles and groups of every instruction set."""


def weight_of(shape: tuple[int, int], weight_format: WeightFormat, *, has_bias: bool = False) -> PackedWeight:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    bias = torch.randn(shape[0], generator=generator) if has_bias else None
    return pack_weight(torch.randn(shape, generator=generator), bias, weight_format)


def rows_of(weight: PackedWeight, num_rows: int) -> Tensor:
    """Return rows [num_rows, x_width] as the product wants them."""
    x = torch.zeros(num_rows, weight.x_width)
    x[:, : weight.num_inputs] = torch.randn(
        num_rows, weight.num_inputs, generator=torch.Generator().manual_seed(num_rows)
    )
    return x.to(weight.x_dtype)


def multiplied(
    library: NativeLibrary, weight: PackedWeight, x: Tensor, *, y: Tensor | None = None, threads: int = 1
) -> Tensor:
    """Return x times the weight; added to y if there is one."""
    tape = Tape(library, threads)
    source, target = tape.activation(x.shape[1], x.dtype), tape.activation(weight.num_outputs)
    tape.product(Place(source), Place(target), weight, adds=y is not None)
    step = TapeStep([0] * len(x), [ChunkRows(0, len(x), range(len(x)))], [], 1)
    tape.run(step)  # makes room for the rows
    source.memory[: len(x)] = x
    if y is not None:
        target.memory[: len(x)] = y
    tape.run(step)
    tape.close()
    return target.memory[: len(x)].clone()


@every_product
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(library: NativeLibrary, weight_format: WeightFormat, shape: tuple[int, int]) -> None:
    weight = weight_of(shape, weight_format, has_bias=True)
    tolerance = 1e-6 * shape[1] + 2e-6
    for num_rows in ROWS:
        x = rows_of(weight, num_rows)
        expected = product_reference(weight, x[:, : weight.num_inputs])
        torch.testing.assert_close(multiplied(library, weight, x).double(), expected, atol=tolerance, rtol=1e-5)


@every_product
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_gets_the_same_bits_beside_any_others(
    library: NativeLibrary, weight_format: WeightFormat, threads: int
) -> None:
    weight = weight_of((100, 700), weight_format)
    x = rows_of(weight, 130)
    together = multiplied(library, weight, x, threads=threads)
    for first, end in [(0, 1), (129, 130), (5, 7), (17, 30), (0, 97), (34, 130)]:
        assert torch.equal(multiplied(library, weight, x[first:end]), together[first:end])


@every_library
def test_it_adds_to_what_is_there(library: NativeLibrary) -> None:
    weight = weight_of((40, 50), WeightFormat.F32, has_bias=True)
    x, y = rows_of(weight, 3), torch.randn(3, 40)
    torch.testing.assert_close(multiplied(library, weight, x, y=y), multiplied(library, weight, x) + y)


@pytest.mark.parametrize("weight_format", list(WeightFormat), ids=lambda each: each.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_loses_nothing(weight_format: WeightFormat, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(shape, generator=generator)
    packed = pack_weight(plain, None, weight_format)
    assert torch.equal(unpack_weight(packed), plain.to(packed.panels.dtype))


@every_product
def test_rows_of_the_embedding_come_out_of_its_panels(library: NativeLibrary, weight_format: WeightFormat) -> None:
    weight = weight_of((70, 37), weight_format)
    tape, tokens = Tape(library), [0, 69, 31, 32, 33]
    y = tape.activation(37)
    tape.embed(weight, y, 3.0)
    tape.run(TapeStep(tokens, [ChunkRows(0, len(tokens), range(len(tokens)))], [], 1))
    assert torch.equal(y.memory[: len(tokens)], 3.0 * unpack_weight(weight)[tokens].float())


@every_library
def test_rows_that_do_not_fit_are_refused(library: NativeLibrary) -> None:
    tape, weight = Tape(library), weight_of((8, 6), WeightFormat.F32)
    y = tape.activation(8)
    for x in (tape.activation(5), tape.activation(6, torch.bfloat16)):
        with pytest.raises(ValueError, match="cannot read rows"):
            tape.product(Place(x), Place(y), weight)
