"""From settings to a loaded engine, and what hello and health say of it. Imports torch, on first use."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pdserve.core.build import ProcessInfo, Role, product_version, source_commit
from pdserve.core.ids import new_incarnation
from pdserve.core.models import resolve_model_dir
from pdserve.node.desk import EngineFacts

if TYPE_CHECKING:
    from pdserve.core.settings import NodeSettings
    from pdserve.engine.engine import Engine

logger = logging.getLogger(__name__)


async def load_engine(settings: NodeSettings) -> Engine:
    """Load the engine on a thread of its own, so that the event loop answers health checks meanwhile.

    Raises ModelUnavailable, ModelUnsupported or ConfigError.
    """
    return await asyncio.to_thread(_load, settings)


def describe_process(role: Role, settings: NodeSettings, engine: Engine) -> ProcessInfo:
    """Return who this run of the process is, with a new incarnation."""
    return ProcessInfo(
        role=role,
        incarnation=new_incarnation(),
        version=product_version(),
        commit=source_commit(),
        dtype=engine.dtype,
        threads=settings.threads,
        block_size=engine.block_size,
        weight_digest=engine.identity.weight_digest,
        device=engine.device,
        attention_backend=engine.attention_backend,
    )


def engine_facts(engine: Engine, kv_address: str = "") -> EngineFacts:
    """Return what hello says. The advertised length is limited by the pool: a longer sequence could never be held."""
    return EngineFacts(
        identity=engine.identity,
        capabilities=engine.capabilities,
        num_blocks=engine.num_blocks,
        max_model_len=min(engine.max_model_len, engine.num_blocks * engine.block_size),
        eos_token_ids=engine.eos_token_ids,
        kv_address=kv_address,
    )


def _load(settings: NodeSettings) -> Engine:
    import torch

    from pdserve.engine.engine import Engine

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return Engine.load(
        resolve_model_dir(settings.model),
        dtype=dtype,
        device=device,
        threads=settings.threads,
        block_size=settings.block_size,
        num_blocks=settings.kv_blocks,
        max_model_len=settings.max_model_len,
    )
