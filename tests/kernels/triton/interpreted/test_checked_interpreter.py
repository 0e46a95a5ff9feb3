"""The checks are checked: each fault that the bare interpreter hides is seen, and its arithmetic is a GPU's."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

BF16 = torch.bfloat16


@triton.jit
def add_kernel(x, y, out, n, MASKED: tl.constexpr, HAS_OTHER: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    mask = at < (n if MASKED else WIDTH)
    a = tl.load(x + at, mask=mask, other=0.0) if HAS_OTHER else tl.load(x + at, mask=mask)
    tl.store(out + at, a + tl.load(y + at, mask=mask, other=0.0), mask=at < WIDTH)


@triton.jit
def dot_kernel(a, b, out, PRECISION: tl.constexpr, INNER: tl.constexpr):
    rows, inner = tl.arange(0, 16), tl.arange(0, INNER)
    left = tl.load(a + rows[:, None] * INNER + inner[None, :])
    right = tl.load(b + inner[:, None] * 16 + rows[None, :])
    tl.store(out + rows[:, None] * 16 + rows[None, :], tl.dot(left, right, input_precision=PRECISION))


@triton.jit
def cast_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def stride_kernel(out, stride):
    tl.store(out + tl.program_id(0) * stride * 0, stride * 2)


def test_bfloat16_adds_and_rounds_as_torch_does() -> None:
    x, y, out = torch.randn(16).to(BF16), torch.randn(16).to(BF16), torch.zeros(16, dtype=BF16)
    add_kernel[(1,)](x, y, out, 16, MASKED=False, HAS_OTHER=True, WIDTH=16)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e4m3fn])
def test_casts_round_as_torch_does(dtype: torch.dtype) -> None:
    x, out = torch.randn(64) * 30, torch.zeros(64).to(dtype)
    cast_kernel[(1,)](x, out, WIDTH=64)
    assert torch.equal(out.float(), x.to(dtype).float())
    back = torch.zeros(64)
    cast_kernel[(1,)](out, back, WIDTH=64)
    assert torch.equal(back, out.float())


def test_float8_saturates() -> None:
    out = torch.zeros(2).to(torch.float8_e4m3fn)
    cast_kernel[(1,)](torch.tensor([1e6, -1e6]), out, WIDTH=2)
    assert out.float().tolist() == [448.0, -448.0]


def test_bfloat16_products_are_exact() -> None:
    a, b, out = torch.randn(16, 32).to(BF16), torch.randn(32, 16).to(BF16), torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, out, PRECISION="ieee", INNER=32)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-5, rtol=1e-5)


def test_a_product_is_tf32_unless_told_otherwise() -> None:
    a, b = torch.randn(16, 32), torch.randn(32, 16)
    exact, rounded = torch.zeros(16, 16), torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, exact, PRECISION="ieee", INNER=32)
    dot_kernel[(1,)](a, b, rounded, PRECISION=None, INNER=32)
    torch.testing.assert_close(exact, a @ b, atol=1e-5, rtol=1e-5)
    assert 1e-4 < (rounded - a @ b).abs().max() < 5e-2


def test_a_small_inner_dimension_is_refused() -> None:
    a, b, out = torch.randn(16, 8).to(BF16), torch.randn(8, 16).to(BF16), torch.zeros(16, 16)
    with pytest.raises(InterpreterError, match="a GPU takes 16"):
        dot_kernel[(1,)](a, b, out, PRECISION="ieee", INNER=8)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_lane_outside_a_tensor_is_an_error(which: int) -> None:
    tensors = [torch.zeros(15 if index == which else 16) for index in range(3)]
    with pytest.raises(InterpreterError, match="out of bounds"):
        add_kernel[(1,)](*tensors, 16, MASKED=False, HAS_OTHER=True, WIDTH=16)


def test_a_masked_lane_without_other_is_poison() -> None:
    x, y, out = torch.zeros(9), torch.zeros(16), torch.zeros(16)
    add_kernel[(1,)](x, y, out, 9, MASKED=True, HAS_OTHER=False, WIDTH=16)
    assert out[:9].isfinite().all()
    assert out[9:].isnan().all()


def test_two_programs_that_store_to_one_address_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="stores twice"):
        stride_kernel[(2,)](torch.zeros(4, dtype=torch.int32), 1)


def test_overflow_of_32_bits_is_an_error() -> None:
    with pytest.raises(InterpreterError, match="overflow"):
        stride_kernel[(1,)](torch.zeros(4, dtype=torch.int32), 2**30 + 5)
