"""A node's end of the corridor, from its settings and its engine."""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pdserve.core.clock import Clock
from pdserve.core.ids import Incarnation
from pdserve.core.link_faults import parse_link_faults
from pdserve.core.link_shape import parse_link_shape
from pdserve.core.node_settings import DecodeSettings, NodeSettings
from pdserve.core.work import Work, prompt_digest
from pdserve.engine.engine import Engine
from pdserve.kvtransfer import LinkSettings, TransferSpec
from pdserve.kvtransfer.admission import Admission
from pdserve.kvtransfer.channel import Channel
from pdserve.kvtransfer.codec import MAX_FRAME_BYTES
from pdserve.kvtransfer.curve import listener_keys
from pdserve.kvtransfer.faults import FaultyChannel
from pdserve.kvtransfer.nixl_channel import NixlChannel
from pdserve.kvtransfer.nixl_engine import NixlAgent, require_nixl
from pdserve.kvtransfer.shaping import ShapedChannel
from pdserve.kvtransfer.shared_channel import SharedMemoryChannel
from pdserve.kvtransfer.zeromq import ZeroMqChannel

WIRE_DTYPES = {"plain": "", "int8": "int8", "fp8": "float8_e4m3"}
"""Values of the setting `kv_wire`."""

E = TypeVar("E")
_logger = logging.getLogger(__name__)


def link_settings(settings: NodeSettings, engine: Engine, incarnation: Incarnation) -> LinkSettings:
    """Return what the corridor is told. Raises ConfigError if the bounds do not fit each other or the model."""
    small = WIRE_DTYPES[settings.kv_wire]
    takes = (engine.layout.dtype,) if isinstance(settings, DecodeSettings) or not small else ()
    return LinkSettings(
        identity=engine.identity,
        capabilities=replace(engine.capabilities, wire_dtypes=(*takes, *((small,) if small else ()))),
        wire_dtype=small,
        layout=engine.layout,
        incarnation=incarnation,
        secret=settings.secret,
        reserve_policy=settings.reserve if isinstance(settings, DecodeSettings) else "",
        lease_s=settings.lease_s,
        beat_s=settings.beat_s,
        grant_wait_s=settings.grant_wait_s,
        transfer_idle_s=settings.transfer_idle_s,
        window_bytes=settings.kv_window_bytes,
        receive_bytes=settings.kv_receive_bytes,
        staging_bytes=settings.kv_staging_bytes,
    )


def corridor_channel(settings: NodeSettings, clock: Clock, admission: Admission | None = None) -> Callable[[], Channel]:
    """Return what makes the corridor's transport: ZeroMQ with shared memory inside a host or NIXL, or through a worse link.

    A decode node says by `admission` whom it lets in. Raises ConfigError for an engine that is not installed.
    """
    if settings.kv_engine == "nixl":
        require_nixl()
        _logger.warning("KV by NIXL: who reaches UCX's ports may read this process's memory (docs/kv-transfer-nixl.md)")
    secret = settings.secret
    keys = listener_keys(secret.proving) if settings.kv_encryption == "curve" and secret is not None else None
    shape, faults = parse_link_shape(settings.kv_link), parse_link_faults(settings.kv_faults)
    if shape is not None:
        _logger.warning("EXPERIMENT: what this node sends of KV is slowed down to %s (--kv-link)", shape)
    if faults is not None:
        _logger.warning("EXPERIMENT: faults are injected into what this node sends of KV: %s (--kv-faults)", faults)

    # A link that is made worse for an experiment stands for a network, which shared memory is not.
    is_shared = settings.kv_shared_memory == "auto" and shape is None and faults is None and sys.platform == "linux"

    def make_channel() -> Channel:
        network = ZeroMqChannel(keys, settings.kv_staging_bytes // MAX_FRAME_BYTES, admission)
        channel: Channel = network
        if settings.kv_engine == "nixl":
            # No shared memory of ours beside it: inside a host UCX uses its own.
            channel = NixlChannel(network, NixlAgent(is_local=not settings.needs_secret), clock, secret)
        elif is_shared:
            channel = SharedMemoryChannel(network, clock)
        if shape is not None:
            channel = ShapedChannel(channel, shape, clock)
        return channel if faults is None else FaultyChannel(channel, faults, clock)

    return make_channel


def transfer_spec(work: Work, peer: Incarnation | None) -> TransferSpec:
    """Return the transfer of a leg that is handed over, as this node's end of the corridor sees it; `peer` is the other end."""
    assert work.transfer_id is not None, "only what is handed over has a transfer"
    assert peer is not None, "a transfer has two ends"
    return TransferSpec(
        transfer_id=work.transfer_id,
        attempt=work.leg.attempt,
        peer=peer,
        prompt_digest=prompt_digest(work.context_ids),
        num_tokens=work.context_len,
        arrived_s=work.arrived_s,
    )


def on_loop(handle: Callable[[E], None]) -> Callable[[E], None]:
    """Return a callback for the corridor's thread that has `handle` run on the event loop, in order."""
    loop = asyncio.get_running_loop()

    def on_event(event: E) -> None:
        loop.call_soon_threadsafe(handle, event)

    return on_event
