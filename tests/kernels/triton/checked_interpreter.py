"""Triton's interpreter, made honest: what a GPU would compute, or an error where a GPU would go astray.

The interpreter of Triton runs a kernel's source in NumPy, one program after another. As it comes it computes with the bit
patterns of bfloat16 and float8, reads zeros for lanes that a mask turns off, and follows any address. `install` replaces those
parts, for the whole process:

- bfloat16 and float8 compute as float32 and round as torch does; float8 saturates, as the hardware's conversion does;
- a masked lane without `other` reads NaN (or -1), since a GPU leaves it undefined;
- every address must lie inside a storage of the launch's tensors, and no address is stored twice in a launch;
- `tl.dot` rounds to tf32 unless told otherwise, and refuses inner dimensions that no GPU takes;
- 32-bit integer overflow is an error.

It cannot show races of loads with stores, speed, or how a matrix unit adds.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

Array = NDArray[np.generic]
Addresses = NDArray[np.uint64]
Mask = NDArray[np.bool_]

SOFT = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
"""Types that NumPy lacks; the interpreter keeps their bits in unsigned integers."""
HARD = {tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64}
SMALLEST_INNER = {8: 32, 16: 16, 32: 8, 64: 4}
"""By bits of an element: the smallest inner dimension of a matrix product."""
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
NOT_FOR_SOFT = ("create_fma", "create_clampf", "create_rsqrt", "create_erf")


class ScalarType(Protocol):
    """A type of `triton.language`."""

    @property
    def scalar(self) -> "ScalarType":
        """The element's type."""

    @property
    def primitive_bitwidth(self) -> int:
        """Bits of an element."""


class Handle(Protocol):
    """The interpreter's value: an array, and the type it stands for."""

    data: Array
    dtype: ScalarType

    def get_element_ty(self) -> ScalarType:
        """Return what a pointer points to."""


def handle(data: Array, dtype: object) -> Handle:
    """Return the interpreter's value of an array."""
    made: Handle = interpreter.TensorHandle(data, dtype)
    return made


def to_torch(value: Handle) -> Tensor:
    """Return the tensor that `value` stands for."""
    data = np.ascontiguousarray(value.data)
    kind = SOFT.get(value.dtype.scalar)
    if kind is None:
        return torch.from_numpy(data)
    return torch.from_numpy(data.view(np.uint8 if data.itemsize == 1 else np.int16)).view(kind)


def widened(value: Handle) -> Handle:
    """Return a soft value as float32, any other as it is."""
    if value.dtype.scalar not in SOFT:
        return value
    return handle(to_torch(value).float().numpy().reshape(value.data.shape), tl.float32)


def converted(value: Handle, target: ScalarType) -> Handle:
    """Return a floating value rounded to `target`."""
    numbers = to_torch(value)
    kind = SOFT.get(target) or HARD[target]
    if kind.itemsize == 1:
        largest = torch.finfo(kind).max
        numbers = numbers.float().clamp(-largest, largest)  # NaN stays
    rounded = numbers.to(kind)
    if target in SOFT:
        bits = rounded.view(torch.uint8 if kind.itemsize == 1 else torch.int16).numpy()
        return handle(bits.view(np.uint8 if kind.itemsize == 1 else np.uint16).reshape(value.data.shape), target)
    return handle(rounded.numpy().reshape(value.data.shape), target)


class Arithmetic:
    """Casts and operations on soft types, by way of float32."""

    def __init__(self) -> None:
        builder = interpreter.InterpreterBuilder
        self._cast: Callable[..., Handle] = builder.cast_impl
        self._binary: Callable[..., Handle] = builder.binary_op
        self._unary: Callable[..., Handle] = builder.unary_op
        self._dot: Callable[..., Handle] = builder.create_dot
        self._sum = interpreter.ReduceOps.sum

    def cast(self, builder: object, value: Handle, target_type: ScalarType) -> Handle:
        """Convert to another element type."""
        source, target = value.dtype.scalar, target_type.scalar
        if source in SOFT and target not in SOFT and target not in HARD:
            return self._cast(builder, widened(value), target_type)
        if target in SOFT and source not in SOFT and source not in HARD:
            return converted(handle(value.data.astype(np.float32), tl.float32), target)
        if source in SOFT or target in SOFT:
            return converted(value, target)
        return self._cast(builder, value, target_type)

    def convert(self, builder: object, value: Handle, target_type: ScalarType, rounding: object) -> Handle:
        """Convert between floating types, to the nearest."""
        return self.cast(builder, value, target_type)

    def binary(self, builder: object, left: Handle, right: Handle, operation: Callable[..., Array]) -> Handle:
        """Compute, or compare, two values."""
        kind = left.dtype.scalar
        if kind not in SOFT or operation in BITWISE:
            return self._binary(builder, left, right, operation)
        made = self._binary(builder, widened(left), widened(right), operation)
        return made if made.data.dtype == np.bool_ else converted(made, kind)

    def unary(self, builder: object, value: Handle, operation: Callable[..., Array]) -> Handle:
        """Compute a function of a value."""
        kind = value.dtype.scalar
        made = self._unary(builder, widened(value), operation)
        return converted(made, kind) if kind in SOFT else made

    def dot(self, builder: object, a: Handle, b: Handle, add: Handle, precision: object, imprecise: int) -> Handle:
        """Multiply matrices: exact products, float32 sums."""
        least = SMALLEST_INNER[a.dtype.primitive_bitwidth]
        if a.data.shape[-1] < least:
            raise ValueError(f"tl.dot over {a.data.shape[-1]} elements of {a.dtype}; a GPU takes {least} or more")
        if a.dtype.scalar is not b.dtype.scalar and a.dtype.scalar != b.dtype.scalar:
            raise TypeError(f"tl.dot of {a.dtype} and {b.dtype}")
        a, b = widened(a), widened(b)
        if a.dtype.scalar == tl.float32 and str(precision).endswith("TF32"):
            a, b = as_tf32(a), as_tf32(b)
        return self._dot(builder, a, b, add, precision, imprecise)

    def sum(self, reduction: object, value: object) -> object:
        """Refuse sums of soft types: on a GPU their order decides what is lost."""
        if value.handle.dtype.scalar in SOFT:  # type: ignore[attr-defined]  # a tl.tensor, untyped
            raise TypeError("sum of bfloat16 or float8: convert to float32 first")
        return self._sum(reduction, value)


def as_tf32(value: Handle) -> Handle:
    """Return float32 values rounded to the 10 bits of mantissa that a tf32 product sees."""
    bits = np.ascontiguousarray(value.data).view(np.uint32)
    return handle(((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32), tl.float32)


class Memory:
    """The storages of the launch that runs, and what it stored so far."""

    def __init__(self) -> None:
        builder = interpreter.InterpreterBuilder
        self._load: Callable[..., Handle] = builder.create_masked_load
        self._store: Callable[..., None] = builder.create_masked_store
        self._arguments: Callable[..., object] = interpreter.GridExecutor._init_args_hst
        self._starts = np.zeros(0, np.uint64)
        self._stops = np.zeros(0, np.uint64)
        self._stored: list[Addresses] = []

    def arguments(self, executor: object, positional: list[object], named: dict[str, object]) -> object:
        """Note the storages when a launch begins."""
        made = self._arguments(executor, positional, named)
        tensors = [item for item in (*positional, *named.values()) if isinstance(item, Tensor)]
        spans = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (t.untyped_storage() for t in tensors)})
        self._starts = np.array([start for start, _ in spans], np.uint64)
        self._stops = np.array([stop for _, stop in spans], np.uint64)
        self._stored = []
        return made

    def finish(self, *_: object) -> None:
        """Check the stores of a launch when it ends; tensors of the CPU need no copy back."""
        if self._stored:
            addresses = np.concatenate(self._stored)
            if np.unique(addresses).shape[0] != addresses.shape[0]:
                raise RuntimeError("a launch stores twice to one address: who is last is chance")

    def load(self, builder: object, where: Handle, mask: Handle, other: Handle | None, *hints: object) -> Handle:
        """Read the lanes of the mask."""
        kind = where.get_element_ty()
        numpy_type = interpreter._get_np_dtype(kind)
        self._check("load", where, mask, numpy_type.itemsize)
        # Of a single lane Triton's front end asks whether `other` is true, and drops one of 0: it cannot be told from none.
        if other is None and where.data.size > 1 and not mask.data.all():
            # All bits set: NaN of every floating type, -1 of integers.
            poison = np.frombuffer(b"\xff" * numpy_type.itemsize, dtype=numpy_type)[0]
            other = handle(np.full(where.data.shape, poison, dtype=numpy_type), kind)
        return self._load(builder, where, mask, other, *hints)

    def store(self, builder: object, where: Handle, value: Handle, mask: Handle, *hints: object) -> None:
        """Write the lanes of the mask."""
        addresses = self._check("store", where, mask, max(1, where.get_element_ty().primitive_bitwidth // 8))
        self._stored.append(addresses)
        self._store(builder, where, value, mask, *hints)

    def _check(self, what: str, where: Handle, mask: Handle, num_bytes: int) -> Addresses:
        addresses = where.data[np.broadcast_to(mask.data.astype(np.bool_), where.data.shape)].astype(np.uint64)
        if addresses.size and self._starts.size:
            span = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
            is_bad = (span < 0) | (addresses + np.uint64(num_bytes) > self._stops[np.maximum(span, 0)])
            if is_bad.any():
                raise IndexError(f"{what} out of bounds in {int(is_bad.sum())} of {addresses.size} lanes")
        return addresses


def install() -> None:
    """Replace the interpreter's arithmetic and memory, once in a process that set TRITON_INTERPRET before it met Triton."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    arithmetic, memory = Arithmetic(), Memory()
    casts = [name for name, member in vars(builder).items() if _is_cast(name, member)]
    for name in (*casts, "cast_impl"):
        setattr(builder, name, _bound(arithmetic.cast))
    builder.create_int_cast = lambda self, value, target, is_signed: arithmetic.cast(self, value, target)
    builder.create_fp_to_fp = _bound(arithmetic.convert)
    builder.binary_op = _bound(arithmetic.binary)
    builder.unary_op = _bound(arithmetic.unary)
    builder.create_dot = _bound(arithmetic.dot)
    for name in NOT_FOR_SOFT:
        setattr(builder, name, _refusing_soft(getattr(builder, name)))
    interpreter.ReduceOps.sum = _bound(arithmetic.sum)
    builder.create_masked_load = _bound(memory.load)
    builder.create_masked_store = _bound(memory.store)
    executor._init_args_hst = _bound(memory.arguments)
    executor._restore_args_dev = lambda self, *arguments: memory.finish()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)


def _is_cast(name: str, member: object) -> bool:
    return callable(member) and name in {
        "create_si_to_fp",
        "create_ui_to_fp",
        "create_fp_to_si",
        "create_fp_to_ui",
        "create_fp_ext",
        "create_fp_trunc",
    }


def _bound(method: Callable[..., object]) -> Callable[..., object]:
    """Return a function, which a class binds to its instances; a bound method would not be."""

    def function(*arguments: object) -> object:
        return method(*arguments)

    return function


def _refusing_soft(method: Callable[..., Handle]) -> Callable[..., Handle]:
    def refuse(builder: object, *values: Handle | bool) -> Handle:
        if any(not isinstance(value, bool) and value.dtype.scalar in SOFT for value in values):
            raise TypeError(f"{method.__name__} of bfloat16 or float8: convert to float32 first")
        return method(builder, *values)

    return refuse
