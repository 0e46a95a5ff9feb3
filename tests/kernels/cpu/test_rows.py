"""What is done to each row by itself, against torch in float64; widths that fill no whole vector."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as fn
from torch import Tensor

from pdserve.kernels.native.library import NativeLibrary
from pdserve.kernels.native.structures import Activation
from pdserve.kernels.native.tape import AttentionLayer, Place, Rotation, Rows, Tape, TapeStep
from pdserve.kernels.ragged import ChunkRows
from tests.kernels.cpu.libraries import every_library

NUM_ROWS = 5
WIDTHS = [1, 7, 16, 48, 577]


def run(tape: Tape, given: dict[int, tuple[Rows, Tensor]], positions: range = range(NUM_ROWS)) -> None:
    """Run the tape for rows at `positions` with these activations set."""
    step = TapeStep([0] * len(positions), [ChunkRows(positions.start, len(positions), range(positions.stop))], [], 1)
    tape.run(step)  # makes room for the rows
    for rows, values in given.values():
        rows.memory[: len(values)] = values
    tape.run(step)


def random(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@every_library
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize(("adds", "rounds"), [(False, False), (True, False), (False, True)])
def test_norms(library: NativeLibrary, width: int, is_centered: bool, adds: bool, rounds: bool) -> None:
    tape, heads = Tape(library), 3
    dtype = torch.bfloat16 if rounds else torch.float32
    x, y = tape.activation(heads * width), tape.activation(heads * width, dtype)
    scale, bias, before = random(width), random(width) + 1, random(NUM_ROWS, heads * width)
    tape.norm(Place(x), Place(y), scale, 1e-3, bias=bias, num_heads=heads, is_centered=is_centered, adds=adds)
    values = random(NUM_ROWS, heads * width) * 3 + 1
    run(tape, {0: (x, values), 1: (y, before.to(dtype))})
    z = values.double().view(NUM_ROWS, heads, width)
    z = z - z.mean(2, keepdim=True) if is_centered else z
    z = z / (z.square().mean(2, keepdim=True) + 1e-3).sqrt() * scale + bias
    expected = z.flatten(1) + (before.double() if adds else 0)
    tolerance = 8e-3 if rounds else 2e-6
    torch.testing.assert_close(y.memory[:NUM_ROWS].double(), expected, atol=tolerance, rtol=tolerance)


@every_library
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (40, 10), (6, 3)])
def test_rotations(library: NativeLibrary, is_interleaved: bool, head_dim: int, pairs: int) -> None:
    tape, heads, positions = Tape(library), 3, range(1000, 1000 + NUM_ROWS)
    frequencies = 10000.0 ** (-torch.arange(pairs) / pairs)
    rotation = Rotation(frequencies, 1.25, is_interleaved)
    x, angles = tape.activation(heads * head_dim + 2), tape.activation(2 * pairs)
    tape.angles(rotation, angles)
    tape.rotate(rotation, x.columns(2), angles, heads, head_dim)
    values = random(NUM_ROWS, heads * head_dim + 2)
    # One run turns the heads once; the one that only makes room turns zeros.
    run(tape, {0: (x, values)}, positions)
    angle = torch.tensor(positions).float()[:, None, None] * frequencies
    cosine, sine = angle.double().cos() * 1.25, angle.double().sin() * 1.25
    expected = values.double().clone()
    head = expected[:, 2:].view(NUM_ROWS, heads, head_dim)
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if is_interleaved else (slice(pairs), slice(pairs, 2 * pairs))
    )
    a, b = head[..., first].clone(), head[..., second].clone()
    head[..., first], head[..., second] = a * cosine - b * sine, b * cosine + a * sine
    torch.testing.assert_close(x.memory[:NUM_ROWS].double(), expected, atol=2e-6, rtol=1e-6)


FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: fn.silu,
    Activation.GELU_TANH: lambda x: fn.gelu(x, approximate="tanh"),
    Activation.GELU: fn.gelu,
    Activation.RELU: fn.relu,
    Activation.RELU_SQUARED: lambda x: fn.relu(x).square(),
}


@every_library
@pytest.mark.parametrize("activation", FUNCTIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_activations(library: NativeLibrary, activation: Activation, is_gated: bool, rounds: bool) -> None:
    width = 211
    tape = Tape(library)
    x, y = tape.activation(2 * width), tape.activation(width, torch.bfloat16 if rounds else torch.float32)
    tape.activate(activation, Place(x), Place(y), width, is_gated=is_gated)
    values = random(NUM_ROWS, 2 * width)
    values[0, :width] = torch.linspace(-100, 100, width)
    values[1, :width] = torch.linspace(-0.01, 0.01, width)
    run(tape, {0: (x, values)})
    exact = values.double()
    expected = FUNCTIONS[activation](exact[:, :width]) * (exact[:, width:] if is_gated else 1)
    # 1 + erf loses digits where it is nearly 0, in torch's fp32 as well.
    atol = 1e-6 if rounds or activation in (Activation.GELU, Activation.GELU_TANH) else 1e-7
    torch.testing.assert_close(y.memory[:NUM_ROWS].double(), expected, atol=atol, rtol=8e-3 if rounds else 1e-5)


@every_library
@pytest.mark.parametrize("cap", [None, 5.0])
def test_scaled_and_capped(library: NativeLibrary, cap: float | None) -> None:
    tape = Tape(library)
    x = tape.activation(37)
    tape.scale(x, 1.5, cap)
    values = random(NUM_ROWS, 37) * 10
    run(tape, {0: (x, values)})
    expected = values.double() * 1.5
    expected = expected if cap is None else cap * (expected / cap).tanh()
    torch.testing.assert_close(x.memory[:NUM_ROWS].double(), expected, atol=2e-6, rtol=2e-6)


@every_library
def test_a_cap_leaves_small_numbers_their_digits(library: NativeLibrary) -> None:
    tape = Tape(library)
    x = tape.activation(64)
    tape.scale(x, 1.0, 2.0)
    values = torch.logspace(-8, 0.5, 64) * torch.tensor([1.0, -1.0]).repeat(32)
    run(tape, {0: (x, values.expand(NUM_ROWS, 64))})
    expected = 2.0 * (values.double() / 2.0).tanh()
    torch.testing.assert_close(x.memory[0].double(), expected, atol=0, rtol=1e-6)


SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -2.5,
    1e-8,
    6e-8,
    -6e-8,
    5.96e-8,
    6.1e-5,
    6.0e-5,
    65504.0,
    65519.9,
    65520.0,
    1e6,
    -1e30,
    3.4e38,
]
SPECIAL += [
    1 + 2**-8,
    1 + 3 * 2**-8,
    1 + 2**-11,
    1 + 3 * 2**-11,
    2**-25,
    3 * 2**-25,
    1e-40,
    float("inf"),
    float("-inf"),
]


@every_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cache_is_written_as_torch_rounds(library: NativeLibrary, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    spread = torch.randn(400, generator=generator) * 10.0 ** torch.randint(-9, 6, (400,), generator=generator)
    numbers = torch.cat([torch.tensor(SPECIAL), spread])
    kv_heads, dim = 1, len(numbers) // 2
    keys, values = numbers[: kv_heads * dim], numbers[dim : 2 * dim]
    caches = [torch.full((9, kv_heads, 200), 7.0, dtype=dtype) for _ in range(2)]
    width = 200
    tape = Tape(library)
    x = tape.activation(2 * width)
    layer = AttentionLayer(caches[0], caches[1], 1, 1, None, 1.0)
    tape.write(Place(x), x.columns(width), layer)
    row = torch.cat([keys[:width], values[:width]])
    step = TapeStep([0], [ChunkRows(0, 1, [4])], [], 1)
    tape.run(step)
    x.memory[0] = row
    tape.run(step)
    for cache, given in zip(caches, (keys, values), strict=True):
        assert torch.equal(cache[4, 0], given[:width].to(dtype))
        assert (cache[:4] == 7).all()
        assert (cache[5:] == 7).all()


@every_library
def test_the_rows_that_are_kept_follow_each_other(library: NativeLibrary) -> None:
    tape = Tape(library)
    x, y = tape.activation(9), tape.activation(9, of_kept=True)
    tape.keep(x, y)
    step = TapeStep([0] * 6, [ChunkRows(0, 6, range(6))], [5, 0, 3], 1)
    tape.run(step)
    x.memory[:6] = random(6, 9)
    tape.run(step)
    assert torch.equal(y.memory[:3], x.memory[[5, 0, 3]])


@every_library
def test_a_closed_tape_does_not_run(library: NativeLibrary) -> None:
    tape = Tape(library, 2)
    x = tape.activation(4)
    tape.scale(x, 2.0, None)
    tape.close()
    tape.close()
    with pytest.raises(ValueError, match="closed"):
        tape.run(TapeStep([0], [ChunkRows(0, 1, [0])], [], 1))
