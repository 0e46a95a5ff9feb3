"""The process of a node: bind, load the engine while health says NOT_SERVING, work, drain, stop."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from pdserve.core.build import ProcessInfo
from pdserve.core.clock import Clock, SystemClock
from pdserve.core.logs import identify
from pdserve.core.node_settings import NodeSettings
from pdserve.node.admin import NodeViews
from pdserve.node.attach import StreamSettings
from pdserve.node.desk import Desk
from pdserve.node.legs import Legs
from pdserve.node.service import NodeServicer
from pdserve.rpc.admin_port import admin_port
from pdserve.rpc.process_gauges import process_gauges
from pdserve.rpc.secret_watch import watched
from pdserve.rpc.server import GrpcServer, announce
from pdserve.rpc.stops import StopSignals
from pdserve.rpc.tls import tls_source
from pdserve.v1 import node_pb2, node_pb2_grpc

TICK_S = 0.5
EXIT_STUCK = 70
"""Exit status of a node whose engine or corridor cannot be stopped in an orderly way (EX_SOFTWARE of sysexits.h)."""

logger = logging.getLogger(__name__)

MakeDesk = Callable[[Legs, Clock, Callable[[], None]], Awaitable[tuple[Desk, ProcessInfo]]]
"""Given the legs, the clock and "the load changed": load the engine and return the desk."""


async def serve_node(settings: NodeSettings, make_desk: MakeDesk) -> None:
    """Run a node until it is told to stop.

    The first SIGTERM or SIGINT drains within `settings.drain_s`; the second stops at once.
    """
    clock = SystemClock()
    streams = StreamSettings(settings.lease_s, settings.beat_s, settings.max_waiting)
    servicer = NodeServicer(streams, settings.secret, clock)
    server = GrpcServer(settings.host, settings.port, tls=tls_source(settings.tls_listening))
    service_name = node_pb2.DESCRIPTOR.services_by_name["NodeService"].full_name
    server.add(service_name, lambda target: node_pb2_grpc.add_NodeServiceServicer_to_server(servicer, target))
    views = NodeViews(servicer)
    with StopSignals().installed() as stops:
        await server.start()
        address = f"{settings.advertised_host}:{server.port}"
        logger.info("listening on %s:%d as %s; loading %s", settings.host, server.port, address, settings.model)
        try:
            async with watched(settings.secret_watch()), admin_port(settings, views) as admin:
                announce(settings.ready_fd, {"grpc": address} | admin)
                made = await _unless_told(stops, make_desk(servicer.legs, clock, servicer.load_changed))
                if made is None:
                    logger.info("stopped before the model was loaded")
                    return
                await _Node(settings, server, servicer, views, *made, stops, clock).run()
        finally:
            await server.stop(0.2)


class _Node:
    """A loaded node, from its first router to its end."""

    def __init__(
        self,
        settings: NodeSettings,
        server: GrpcServer,
        servicer: NodeServicer,
        views: NodeViews,
        desk: Desk,
        process: ProcessInfo,
        stops: StopSignals,
        clock: Clock,
    ) -> None:
        self._settings, self._server, self._servicer, self._views = settings, server, servicer, views
        self._desk, self._process, self._stops, self._clock = desk, process, stops, clock

    async def run(self) -> None:
        """Work until told to stop, or until the desk cannot go on; then leave nothing behind."""
        identify(self._process.incarnation)
        self._servicer.open_for_work(self._desk, self._process, process_gauges)
        self._views.fault = self._why_not_ready
        logger.info("loaded; waiting for routers", extra={"incarnation": self._process.incarnation.hex()})
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(self._desk.run()), tasks.create_task(self._tick())]
            stopping = tasks.create_task(self._stops.first.wait())
            broken = tasks.create_task(self._desk.wait_broken())
            await asyncio.wait({stopping, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                self._leave_at_once(f"the node cannot go on: {broken.result()}")
            await self._drain(tasks)
            self._servicer.close_streams("the node stops")
            if self._desk.step_age_s() > self._settings.step_limit_s:
                self._leave_at_once("the running step is stuck")
            for task in (*loops, stopping, broken):
                task.cancel()
        self._desk.close()
        logger.info("stopped")

    async def _drain(self, tasks: asyncio.TaskGroup) -> None:
        drain_s = self._settings.drain_s
        logger.info("draining for up to %g s; a second signal stops at once", drain_s)
        drained = tasks.create_task(self._servicer.drain(drain_s))
        second = tasks.create_task(self._stops.second.wait())
        await asyncio.wait({drained, second}, return_when=asyncio.FIRST_COMPLETED)
        if second.done():
            # A step may be running in a thread that nothing can end: routers learn from the broken streams.
            self._leave_at_once("a second signal")
        second.cancel()

    async def _tick(self) -> None:
        """Have the desk look at its deadlines, and keep readiness true."""
        was_ready = False
        while True:
            await asyncio.sleep(TICK_S)
            self._desk.tick(self._clock.now_s())
            fault = self._why_not_ready()
            if (not fault) == was_ready:
                continue
            was_ready = not fault
            await self._server.set_ready(was_ready)
            logger.log(logging.INFO if was_ready else logging.WARNING, f"not ready: {fault}" if fault else "ready")

    def _why_not_ready(self) -> str:
        """Return what keeps the node from serving: a stuck step, a drain, no peer to transfer to, or transfers that fail."""
        if self._desk.step_age_s() > self._settings.step_limit_s:
            return "a step is stuck"
        if self._servicer.is_draining:
            return "draining"
        if not self._desk.load().connected_peers:
            return "no peer can be transferred to"
        return self._desk.transfer_fault()

    def _leave_at_once(self, why: str) -> None:
        """End the process without waiting for threads that may never end."""
        logger.error("leaving at once: %s", why)
        logging.shutdown()
        os._exit(EXIT_STUCK)


async def _unless_told(
    stops: StopSignals, work: Awaitable[tuple[Desk, ProcessInfo]]
) -> tuple[Desk, ProcessInfo] | None:
    """Return what `work` returns, or None if a signal comes first."""
    running = asyncio.ensure_future(work)
    told = asyncio.ensure_future(stops.first.wait())
    try:
        await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        told.cancel()
        running.cancel()
