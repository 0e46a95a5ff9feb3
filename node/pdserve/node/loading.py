"""From settings to a loaded engine, and what hello and health say of it. Imports torch, on first use."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from pdserve.core.build import ProcessInfo, Role, product_version, source_commit
from pdserve.core.errors import ConfigError
from pdserve.core.identity import Capabilities
from pdserve.core.ids import new_incarnation
from pdserve.core.models import resolve_model_dir
from pdserve.node.desk import EngineFacts

if TYPE_CHECKING:
    from pdserve.core.node_settings import NodeSettings
    from pdserve.engine.engine import Engine


async def load_engine(settings: NodeSettings) -> Engine:
    """Load the engine on a thread of its own, so that the event loop answers health checks meanwhile.

    Raises ModelUnavailable, ModelUnsupported or ConfigError.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Engine] = loop.create_future()

    def load() -> None:
        try:
            engine = _load(settings)
        except Exception as error:  # noqa: BLE001 - handed to the coroutine that waits
            _hand_over(loop, loaded, error)
        else:
            _hand_over(loop, loaded, engine)

    # A daemon thread: a node that is told to stop must not wait for a model that nobody wants any more.
    threading.Thread(target=load, name="load-engine", daemon=True).start()
    return await loaded


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


def engine_facts(engine: Engine, capabilities: Capabilities, kv_address: str = "") -> EngineFacts:
    """Return what hello says. The advertised length is limited by the pool: a longer sequence could never be held."""
    return EngineFacts(
        identity=engine.identity,
        capabilities=capabilities,
        num_blocks=engine.num_blocks,
        max_model_len=min(engine.max_model_len, engine.num_blocks * engine.block_size),
        eos_token_ids=engine.eos_token_ids,
        kv_address=kv_address,
    )


def _hand_over(loop: asyncio.AbstractEventLoop, loaded: asyncio.Future[Engine], outcome: Engine | Exception) -> None:
    def settle() -> None:
        if loaded.cancelled():
            return
        if isinstance(outcome, Exception):
            loaded.set_exception(outcome)
        else:
            loaded.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the node has stopped meanwhile
        loop.call_soon_threadsafe(settle)


def check_device(device: str) -> None:
    """Raise ConfigError for a device that torch does not know or this machine does not have."""
    import torch

    try:
        where = torch.device(device)
    except RuntimeError:
        raise ConfigError([f"--device: {device!r} is no device"], hint="auto, cpu or cuda[:N]") from None
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        fault = f"--device: {device} is not here; torch sees {torch.cuda.device_count()} CUDA devices"
        raise ConfigError([fault], hint="`pdserve doctor` tells what this machine has")


def _load(settings: NodeSettings) -> Engine:
    from pdserve.engine.engine import Engine

    device = settings.device
    if device == "auto":
        device = "cpu"  # until the GPU path has run on a GPU, only who asks for it by name gets it
    check_device(device)
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
        attention_backend=None if settings.attention_backend == "auto" else settings.attention_backend,
    )
