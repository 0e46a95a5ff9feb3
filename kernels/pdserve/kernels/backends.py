"""The one place that chooses who computes attention, by name, once at start, and says so in the log."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdserve.core.errors import ConfigError
from pdserve.kernels import kv_write, paged_attention

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """Implementations of the operations that have more than one; signatures are those of their reference modules."""

    name: str
    devices: frozenset[str]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    attend: Callable[..., Tensor]
    """`paged_attention.paged_attention`; keyword arguments hide from Callable."""


BACKENDS = {
    "torch-sdpa": Backend(
        name="torch-sdpa",
        devices=frozenset({"cpu", "cuda"}),
        write_kv=kv_write.write_kv,
        attend=paged_attention.paged_attention,
    ),
}
"""Triton kernels and a native CPU op will stand here."""


def choose_backend(device: str, name: str | None = None) -> Backend:
    """Return the named backend, or the best one for `device` ("cpu", "cuda", …); raise ConfigError if there is none."""
    for backend in BACKENDS.values():
        if device in backend.devices and name in (None, backend.name):
            log.info("attention backend %s on %s", backend.name, device)
            return backend
    raise ConfigError(
        [f"no attention backend {name or 'at all'} for device {device}"], hint=f"known: {', '.join(BACKENDS)}"
    )
