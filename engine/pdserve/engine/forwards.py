"""The one place that chooses which forward pass serves a model, once at load, and says so in the log.

A native pass is taken where the backend has one, the architecture is known, and the pass was seen to agree with the module of
`transformers`. Else the module itself computes, with packed linear layers where that is possible.
"""

import logging
import time

import torch

from pdserve.engine.agreement import BOUNDS, largest_difference, pool_like
from pdserve.engine.decode_graphs import DecodeGraphs
from pdserve.engine.families import NotKnown, read_model
from pdserve.engine.forward import Forward
from pdserve.engine.kv_pool import TORCH_DTYPES, KvPool
from pdserve.engine.loading import LoadedModel
from pdserve.engine.native_model import NativeForward
from pdserve.engine.probe import Discovered
from pdserve.kernels.backends import BACKENDS, Backend
from pdserve.kernels.linear import can_pack, pack_linears
from pdserve.kernels.native.library import native_library
from pdserve.kernels.native.tape import weight_format_for

log = logging.getLogger(__name__)


def choose_forward(
    model: LoadedModel,
    found: Discovered,
    pool: KvPool,
    backend: Backend,
    where: torch.device,
    max_model_len: int,
    threads: int,
) -> Forward | NativeForward:
    """Return the forward pass of a model on a pool."""
    if backend.has_forward:
        native = _native_forward(model, found, pool, threads)
        if native is not None:
            return native
    if can_pack(where, TORCH_DTYPES[pool.layout.dtype]):
        log.info("forward pass by transformers: %d linear layers packed for oneDNN", pack_linears(model.module))
    else:
        log.info("forward pass by transformers: linear layers of plain torch")
    graphs = None
    if where.type == "cuda" and backend.static_plan is not None:
        graphs = DecodeGraphs(model.module, pool, backend, where, max_model_len)
    return Forward(model.module, pool, backend, where, graphs)


def _native_forward(model: LoadedModel, found: Discovered, pool: KvPool, threads: int) -> NativeForward | None:
    """Return the native pass, or None, having logged why there is none."""
    library = native_library()
    assert library is not None, "its backend is there"
    begun = time.monotonic()
    weight_format = weight_format_for(TORCH_DTYPES[pool.layout.dtype], library)
    try:
        parts = read_model(model.module, model.config, weight_format)
    except NotKnown as reason:
        log.info("no native forward pass for %s: %s", model.architecture, reason)
        return None
    pools = (pool_like(pool.layout), pool_like(pool.layout))
    slow = Forward(model.module, pools[0], BACKENDS["torch-sdpa"], torch.device("cpu"))
    trial = NativeForward(parts, found.calls, pools[1], library, threads)
    difference, bound = largest_difference(slow, trial, model.vocab_size), BOUNDS[pool.layout.dtype]
    trial.close()
    if not difference <= bound:  # also true for NaN
        log.error(
            "the native forward pass of %s is not taken: its logits differ from those of transformers by %.2g of the "
            "largest, %.2g is allowed. The model is served by transformers, slower. Please report this.",
            model.architecture,
            difference,
            bound,
        )
        return None
    log.info(
        "native forward pass: %s weights on %s, %d threads; logits within %.1g of those of transformers (%.2g allowed), %.1f s",
        weight_format.name,
        library.instruction_set,
        threads,
        difference,
        bound,
        time.monotonic() - begun,
    )
    return NativeForward(parts, found.calls, pool, library, threads)
