"""The one place that chooses who computes a step's own operations, by name, once at start, and says so in the log."""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pdserve.core.errors import ConfigError
from pdserve.kernels import kv_write, paged_attention, wire_pack
from pdserve.kernels.native.library import HOW_TO_BUILD
from pdserve.kernels.ragged import ChunkRows, RaggedPlan
from pdserve.kernels.sampling import DrawRows, Summarize, summarize

log = logging.getLogger(__name__)

Caches = Sequence[tuple[Tensor, Tensor]]


class StepPlan(Protocol):
    """What all layers of a step share, in the form that the backend's attention reads."""

    @property
    def num_rows(self) -> int:
        """New tokens of the step."""
        ...

    @property
    def positions(self) -> Tensor:
        """Absolute position of every new token, [rows], int64."""
        ...

    @property
    def write_slots(self) -> Tensor:
        """Slot of every new token, [rows], int64."""
        ...


class StaticPlan(StepPlan, Protocol):
    """A plan of single rows whose tensors stay where they are, so that a captured graph can read them again."""

    def fill(self, chunks: Sequence[ChunkRows]) -> None:
        """Describe these chunks of one row each; the rows that are left over write nothing and see nothing."""
        ...


class MakePlan(Protocol):
    """Makes the plan of a step."""

    def __call__(
        self, chunks: Sequence[ChunkRows], block_size: int, dtype: torch.dtype, device: torch.device
    ) -> StepPlan:
        """Return the plan of chunks whose rows follow each other; `dtype` is that of the model."""
        ...


class MakeStaticPlan(Protocol):
    """Makes a plan for captured graphs."""

    def __call__(self, num_rows: int, max_length: int, block_size: int, device: torch.device) -> StaticPlan:
        """Return an idle plan for up to `num_rows` chunks of one row whose sequences have at most `max_length` positions."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """Implementations of the operations that have more than one; signatures are those of their reference modules."""

    name: str
    devices: frozenset[str]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    attend: Callable[..., Tensor]
    """`paged_attention.paged_attention`; keyword arguments hide from Callable. Its plan is one of this backend's."""
    plan: MakePlan = RaggedPlan
    pack: Callable[[Caches, Tensor, memoryview], None] = wire_pack.pack_layers
    unpack: Callable[[Caches, Tensor, memoryview], None] = wire_pack.unpack_layers
    fuse: Callable[[nn.Module], None] | None = None
    """Replaces those of a model's modules that it knows, at load, and logs which."""
    static_plan: MakeStaticPlan | None = None
    """There where the attention can be captured in a graph."""
    has_forward: bool = False
    """Whether it computes the whole forward pass of the architectures that it knows."""
    summarize: Summarize = summarize
    draw_rows: DrawRows | None = None
    """There where rows are drawn on the device; otherwise their logits are copied to the host, which draws."""


BACKENDS = {
    "torch-sdpa": Backend(
        name="torch-sdpa",
        devices=frozenset({"cpu", "cuda"}),
        write_kv=kv_write.write_kv,
        attend=paged_attention.paged_attention,
    ),
}
"""Those that are always there."""

OPTIONAL = {
    "native": ("pdserve.kernels.native.backend", HOW_TO_BUILD),
    "triton": ("pdserve.kernels.triton_backend", "install it with pip install 'pdserve[triton]'"),
}
"""Those that need something: the module, imported when first asked for, whose `BACKEND` is it, and how to have it."""

PREFERENCE = {"cpu": ("native", "torch-sdpa"), "cuda": ("triton", "torch-sdpa")}
"""What `auto` takes, first choice first; each step down is logged."""


def choose_backend(device: str, name: str | None = None) -> Backend:
    """Return the named backend, or the best one for `device` ("cpu", "cuda", …); raise ConfigError if there is none."""
    for candidate in PREFERENCE.get(device, ()) if name is None else (name,):
        backend = _known(candidate, is_wanted=name is not None)
        if backend is not None and device in backend.devices:
            log.info("attention backend %s on %s", backend.name, device)
            return backend
    raise ConfigError(
        [f"no attention backend {name or 'at all'} for device {device}"],
        hint=f"known: {', '.join((*BACKENDS, *(other for other in OPTIONAL if other not in BACKENDS)))}",
    )


def _known(name: str, *, is_wanted: bool) -> Backend | None:
    """Return a backend by name; None if there is none, or its extra is not installed and nobody named it."""
    if name in BACKENDS or name not in OPTIONAL:
        return BACKENDS.get(name)
    place, advice = OPTIONAL[name]
    try:
        module = importlib.import_module(place)
    except ImportError as error:
        if is_wanted:
            raise ConfigError([f"attention backend {name}: {error}"], hint=advice) from error
        log.warning("attention backend %s is not there (%s); the next best is taken", name, error)
        return None
    backend = module.BACKEND
    assert isinstance(backend, Backend)
    return BACKENDS.setdefault(name, backend)
