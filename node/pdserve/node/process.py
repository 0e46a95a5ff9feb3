"""The process of a node: bind, load the engine while health says NOT_SERVING, work, drain, stop."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from pdserve.core.build import ProcessInfo
from pdserve.core.clock import Clock, SystemClock
from pdserve.core.settings import NodeSettings
from pdserve.node.attach import StreamSettings
from pdserve.node.desk import Desk
from pdserve.node.legs import Legs
from pdserve.node.service import NodeServicer
from pdserve.rpc.process_gauges import process_gauges
from pdserve.rpc.server import GrpcServer, announce
from pdserve.v1 import node_pb2, node_pb2_grpc

TICK_S = 0.5

logger = logging.getLogger(__name__)

MakeDesk = Callable[[Legs, Clock, Callable[[], None]], Awaitable[tuple[Desk, ProcessInfo]]]
"""Given the legs, the clock and "the load changed": load the engine and return the desk."""


async def serve_node(settings: NodeSettings, make_desk: MakeDesk) -> None:
    """Run a node until it is told to stop.

    The first SIGTERM or SIGINT drains within `settings.drain_s`; the second stops at once.
    """
    clock = SystemClock()
    stops = _Stops(asyncio.get_running_loop())
    streams = StreamSettings(settings.lease_s, settings.beat_s, settings.max_waiting)
    servicer = NodeServicer(streams, settings.secret, clock)
    server = GrpcServer(settings.host, settings.port)
    service_name = node_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name
    server.add(service_name, lambda target: node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, target))
    await server.start()
    address = f"{settings.advertised_host}:{server.port}"
    logger.info("listening on %s:%d as %s; loading %s", settings.host, server.port, address, settings.model)
    announce(settings.ready_fd, {"grpc": address})
    try:
        desk, process = await stops.unless_told(make_desk(servicer.legs, clock, servicer.load_changed))
        try:
            await _work(settings, server, servicer, desk, process, stops, clock)
        finally:
            desk.close()
    except _Told:
        logger.info("stopped before the model was loaded")
    finally:
        await server.stop(0.2)


async def _work(
    settings: NodeSettings,
    server: GrpcServer,
    servicer: NodeServicer,
    desk: Desk,
    process: ProcessInfo,
    stops: "_Stops",
    clock: Clock,
) -> None:
    servicer.open_for_work(desk, process, process_gauges)
    logger.info("loaded; waiting for routers", extra={"incarnation": process.incarnation.hex()})
    async with asyncio.TaskGroup() as tasks:
        ticks = _tick(desk, server, settings.step_limit_s, stops.first, clock)
        loops = [tasks.create_task(desk.run()), tasks.create_task(ticks)]
        await stops.first.wait()
        await server.set_ready(False)
        logger.info("draining for up to %g s; a second signal stops at once", settings.drain_s)
        drained = tasks.create_task(servicer.drain(settings.drain_s))
        second = tasks.create_task(stops.second.wait())
        await asyncio.wait({drained, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, second, *loops):
            task.cancel()
        servicer.close_streams("the node stops")
    logger.info("stopped")


async def _tick(desk: Desk, server: GrpcServer, step_limit_s: float, stopping: asyncio.Event, clock: Clock) -> None:
    """Have the desk look at its deadlines, and keep readiness true: able to transfer, and not stuck in a step."""
    was_ready = False
    while True:
        await asyncio.sleep(TICK_S)
        desk.tick(clock.now_s())
        is_stuck = desk.step_age_s() > step_limit_s
        is_ready = bool(desk.load().connected_peers) and not is_stuck and not stopping.is_set()
        if is_ready == was_ready:
            continue
        was_ready = is_ready
        await server.set_ready(is_ready)
        why = "a step is stuck" if is_stuck else "stopping" if stopping.is_set() else "no peer can be transferred to"
        logger.log(logging.INFO if is_ready else logging.WARNING, "ready" if is_ready else f"not ready: {why}")


class _Told(Exception):
    """The process was told to stop."""


class _Stops:
    """Counts the signals that ask the process to stop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def unless_told(self, work: Awaitable[tuple[Desk, ProcessInfo]]) -> tuple[Desk, ProcessInfo]:
        """Return what `work` returns; raise _Told if a signal comes first."""
        running = asyncio.ensure_future(work)
        told = asyncio.ensure_future(self.first.wait())
        try:
            await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise _Told
            return running.result()
        finally:
            told.cancel()
            running.cancel()
