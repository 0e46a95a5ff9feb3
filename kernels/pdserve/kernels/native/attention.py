"""Paged attention of a `transformers` model's step by the native operation; formula and reference: `kernels.paged_attention`.

Used where the rest of the model is computed by torch. A whole native forward pass has it on its tape instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels import paged_attention as by_torch
from pdserve.kernels.native.alone import run_alone
from pdserve.kernels.native.structures import OperationKind, OperationStruct
from pdserve.kernels.native.tape import MAX_HEAD_DIM, AttentionLayer, TapeStep, attention_struct
from pdserve.kernels.ragged import ChunkRows, RaggedPlan


class NativePlan(RaggedPlan):
    """The plan of a step, with the block tables as C reads them."""

    def __init__(self, chunks: Sequence[ChunkRows], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(chunks, block_size, dtype, device)
        self.block_size = block_size
        self.step = TapeStep([], chunks, [], block_size)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: NativePlan,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [rows, heads, value_dim] for `query` [rows, heads, key_dim]; heads over 256 dims are left to torch.

    Raises ValueError if shapes disagree.
    """
    rows, heads, key_dim = query.shape
    if rows != plan.num_rows or key_dim != key_cache.shape[2] or heads % key_cache.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit {plan.num_rows} rows and cache {tuple(key_cache.shape)}"
        )
    if value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError(f"value cache {tuple(value_cache.shape)} does not fit key cache {tuple(key_cache.shape)}")
    if max(key_dim, value_cache.shape[2]) > MAX_HEAD_DIM:
        return by_torch.paged_attention(
            query, key_cache, value_cache, plan, window=window, scaling=scaling, softcap=softcap, sinks=sinks
        )
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    layer = AttentionLayer(key_cache, value_cache, plan.block_size, heads, window, scaling, softcap, sinks)
    x = query.float().contiguous()
    y = torch.empty(rows, heads, value_cache.shape[2])
    operation = OperationStruct(
        kind=OperationKind.ATTEND,
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        attention=attention_struct(layer),
    )
    run_alone(operation, plan.step.struct)
    return y.to(query.dtype)
