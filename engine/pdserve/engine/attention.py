"""How an unmodified `transformers` model computes on the paged pool.

`transformers` calls attention through a table of functions (`AttentionInterface`), and builds masks through another
(`AttentionMaskInterface`). One function of each is registered here under `ATTENTION_NAME`; both hand over to the *frame* of the
running forward, which stands in a context variable. (Not in keyword arguments: some architectures drop those.)

There are two frames: `probe.Discovery`, at load, and `PagedFrame`, in every step.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from pdserve.core.errors import InternalError
from pdserve.engine.kv_pool import KvPool
from pdserve.kernels.backends import Backend, StepPlan

ATTENTION_NAME = "pdserve_paged"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention by the model: `query` [rows, heads, dim], `keys` and `values` [rows, kv_heads, dim]."""

    layer_name: str
    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    others: Mapping[str, object]


class Frame(Protocol):
    """Who answers the model's calls during one forward."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return [rows, heads, value_dim]."""
        ...

    def mask(self, arguments: Mapping[str, object]) -> Tensor | None:
        """Return what the model shall carry to attention as its mask."""
        ...


_frame: ContextVar[Frame | None] = ContextVar("pdserve_attention_frame", default=None)


@contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Let `frame` answer the model's calls inside the `with` block (this thread only)."""
    token = _frame.set(frame)
    try:
        yield
    finally:
        _frame.reset(token)


class PagedFrame:
    """The frame of a step: writes each layer's new keys and values into the pool, then attends over block tables."""

    def __init__(self, pool: KvPool, plan: StepPlan, backend: Backend, on_layer: Callable[[int], None] | None) -> None:
        self._pool = pool
        self._plan = plan
        self._backend = backend
        self._on_layer = on_layer
        self.num_calls = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """Write, report the layer as written, attend. Layers come in the order that the probe saw."""
        layer = self.num_calls
        self.num_calls += 1
        key_cache, value_cache = self._pool.layer(layer)
        self._backend.write_kv(key_cache, value_cache, call.keys, call.values, self._plan.write_slots)
        if self._on_layer is not None:
            self._on_layer(layer)
        return self._backend.attend(
            call.query,
            key_cache,
            value_cache,
            self._plan,
            window=self._pool.layout.layers[layer].window,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def mask(self, arguments: Mapping[str, object]) -> Tensor | None:  # noqa: ARG002 - the plan has the masks
        """Return None: rows know their sequences from the plan."""
        return None


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - 0 outside training
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Answer a model's call: `query` [1, heads, rows, dim] and the like → [1, rows, heads, value_dim]."""
    frame = _frame.get()
    if frame is None:
        raise InternalError("paged attention called outside a step")
    call = AttentionCall(
        layer_name=f"{type(module).__name__} {getattr(module, 'layer_idx', '?')}",
        query=query[0].transpose(0, 1),
        keys=key[0].transpose(0, 1),
        values=value[0].transpose(0, 1),
        mask=attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        others=kwargs,
    )
    return frame.attend(call)[None], None


def _mask(**arguments: object) -> Tensor | None:
    frame = _frame.get()
    if frame is None:
        raise InternalError("attention mask asked for outside a step")
    return frame.mask(arguments)


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


register()
