"""What a launcher would have launched: recorded, not run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Launch:
    """A `@triton.jit` kernel, its arguments by name, and its options (`num_warps` and the like)."""

    kernel: Any
    arguments: Mapping[str, object]
    options: Mapping[str, int]


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Return the launches that `call` makes, in order. Its tensors may lie on the device `meta`: nothing reads them."""
    launches: list[Launch] = []

    def record(kernel: Any, *arguments: object, grid: object, warmup: bool, **keywords: Any) -> None:
        del grid, warmup
        names = set(kernel.arg_names)
        bound = kernel.signature.bind(*arguments, **{k: v for k, v in keywords.items() if k in names})
        bound.apply_defaults()
        launches.append(Launch(kernel, bound.arguments, {k: v for k, v in keywords.items() if k not in names}))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return launches
