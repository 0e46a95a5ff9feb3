"""The router's process: the public service, health, the links to all nodes, and an orderly end."""

import asyncio
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

from pdserve.core.build import ProcessInfo, Role, product_version, source_commit
from pdserve.core.clock import Clock, SystemClock
from pdserve.core.errors import Draining
from pdserve.core.ids import new_incarnation
from pdserve.core.router_settings import RouterSettings
from pdserve.router.access import AccessCheck
from pdserve.router.admission import Admission
from pdserve.router.answering import Answering
from pdserve.router.attach import LinkSettings, NodeLink
from pdserve.router.front import SERVICE_NAME, InferenceFront
from pdserve.router.grpc_guard import GrpcGuard
from pdserve.router.http.admin import RouterViews
from pdserve.router.http.app import HttpFront, HttpSettings
from pdserve.router.key_ring import KeyRing
from pdserve.router.membership import Membership
from pdserve.router.patience import SessionLimits
from pdserve.router.placement import LeastLoaded
from pdserve.router.sessions import Sessions
from pdserve.router.structured import grammar_door
from pdserve.router.text_calls import TextCalls
from pdserve.router.tokenizer import ChatSettings, load_text_model
from pdserve.rpc.admin_port import admin_port
from pdserve.rpc.http_listener import HttpListener, connection_limit
from pdserve.rpc.options import ServerBounds
from pdserve.rpc.secret_watch import watched
from pdserve.rpc.server import GrpcServer, announce
from pdserve.rpc.stops import StopSignals
from pdserve.rpc.tls import tls_source

TOKENIZER_THREADS = 2
MAX_STREAMS = 256
"""Calls at once on one client's connection."""
LAST_GRACE_S = 1.0
"""Time that answered calls get to leave the wire when the process stops."""

logger = logging.getLogger(__name__)


async def serve(settings: RouterSettings) -> None:
    """Run a router until it is told to stop.

    The first SIGTERM or SIGINT drains: new requests are refused, open ones finish within `settings.drain_s`; the second stops
    at once. Raises ModelUnavailable without the model's tokenizer and AddressInUse if the port is taken.
    """
    router = Router(settings, SystemClock())
    with StopSignals().installed() as stops:
        await router.run(stops.first, stops.second)


class Router:
    """Everything of one router. `run` is its whole life."""

    def __init__(self, settings: RouterSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        self.process = ProcessInfo(Role.ROUTER, new_incarnation(), product_version(), source_commit())
        chat = ChatSettings(settings.chat_template, settings.tool_format, settings.reasoning_format)
        self.model = load_text_model(settings.model, chat)
        self.membership = Membership(settings.prefill, settings.decode, self.model.tokenizer_digest)
        self.admission = Admission(settings.max_sessions, settings.max_queue)
        limits = SessionLimits(settings.max_attempts, settings.queue_wait_s, settings.resume_wait_s)
        self.sessions = Sessions(
            self.membership, self.admission, LeastLoaded(), limits, clock, settings.max_unread_bytes
        )
        self.grammars = grammar_door(settings.model, self.model.vocab_size, clock)
        self.keys = KeyRing(settings)
        self.access = AccessCheck(self.keys, is_reachable=settings.needs_secret)
        self.http: HttpListener | None = None
        self._changed = asyncio.Event()
        self.membership.on_change = self._on_change
        self._tls, self._links_tls = tls_source(settings.tls_listening), tls_source(settings.tls_dialling)
        # Above the router's own limit, so that an oversize request is answered by name and not by the transport.
        self.server = GrpcServer(
            settings.host,
            settings.port,
            bounds=ServerBounds(2 * settings.max_message_bytes, connection_limit(), MAX_STREAMS, idle_s=None),
            unread_s=settings.max_unread_s,
            tls=self._tls,
            interceptors=[GrpcGuard(self.access)],
        )

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        """Serve until `stop`, drain until `stop_now` or the drain's end, and leave nothing behind."""
        settings = self._settings
        with ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer") as threads:
            answering = Answering(
                self.process,
                self.model,
                self.membership,
                self.admission,
                self.sessions,
                self.grammars,
                self._clock,
                threads,
                settings.max_unread_s,
                self.access.gauges,
            )
            texts = TextCalls(answering)
            front = InferenceFront(answering, texts, self.access, settings.max_message_bytes)
            self.server.add(SERVICE_NAME, front.register)
            try:
                self.http = self._listener(answering, texts)
                await self.server.start()
                async with watched(settings.secret_watch()), admin_port(settings, RouterViews(answering)) as admin:
                    announce(settings.ready_fd, self._say_where() | admin)
                    await self._serve(stop, stop_now)
            finally:
                if self.http is not None:
                    self.http.close()
                await self.server.stop(LAST_GRACE_S)
                self.grammars.close()
        logger.info("stopped")

    async def _serve(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(link.run()) for link in self._links()]
            running.append(tasks.create_task(self._tell_readiness()))
            running.append(tasks.create_task(self.keys.watch()))
            if self.http is not None:
                tasks.create_task(self.http.serve())
            await stop.wait()
            await self._drain(stop_now)
            if self.http is not None:
                self.http.stop()
            for task in running:
                task.cancel()

    def _listener(self, answering: Answering, texts: TextCalls) -> HttpListener | None:
        settings = self._settings
        if settings.http_port is None:
            return None
        http = HttpSettings(settings.max_message_bytes, settings.cors_origin)
        front = HttpFront(answering, texts, self.access, http)
        return HttpListener(
            front.app, settings.host, settings.http_port, LAST_GRACE_S, settings.max_unread_s, tls=self._tls
        )

    def _say_where(self) -> dict[str, str]:
        """Log where this router listens, and what it has to work with. Return the addresses that others reach it by."""
        settings = self._settings
        bound, address = (f"{host}:{self.server.port}" for host in (settings.host, settings.advertised_host))
        where = bound if bound == address else f"{bound}, advertised as {address}"
        logger.info("listening on %s", where, extra={"incarnation": self.process.incarnation.hex()})
        logger.info("chat: %s", self.model.chat_choice)
        addresses = {"grpc": address}
        if self.http is not None:
            addresses["http"] = f"{settings.advertised_host}:{self.http.port}"
            logger.info("HTTP on %s://%s", "http" if self._tls is None else "https", addresses["http"])
        if settings.needs_secret and self.keys.is_empty and settings.tls_client_ca is None:
            logger.warning("whoever reaches this router may use it; set --api-keys-file, --api-key or --tls-client-ca")
        for role, nodes in (("prefill", settings.prefill), ("decode", settings.decode)):
            if not nodes:
                logger.warning(
                    "no %s node is given, so no request can be served; set --%s HOST:PORT or PDSERVE_%s",
                    role,
                    role,
                    role.upper(),
                )
        return addresses

    def _links(self) -> list[NodeLink]:
        settings = self._settings
        numbers = itertools.count(1)
        link_settings = LinkSettings(
            self.process.incarnation,
            settings.lease_s,
            settings.beat_s,
            settings.secret,
            numbers.__next__,
            tls=self._links_tls,
        )
        return [
            NodeLink(member, self.membership, link_settings, self._clock, self.sessions.leg_event)
            for member in self.membership.members
        ]

    def _on_change(self) -> None:
        self._changed.set()
        self.sessions.pump()

    async def _tell_readiness(self) -> None:
        """Keep health at what the pools allow: SERVING with a usable prefill and decode node of equal identity."""
        was_ready = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            is_ready = self.membership.is_ready and not self.admission.is_draining
            if is_ready != was_ready:
                was_ready = is_ready
                logger.info("ready" if is_ready else "not ready: %s", *([] if is_ready else [self._why_not_ready()]))
                await self.server.set_ready(is_ready)

    def _why_not_ready(self) -> str:
        return "draining" if self.admission.is_draining else self.membership.why_empty()

    async def _drain(self, stop_now: asyncio.Event) -> None:
        drain_s = self._settings.drain_s
        logger.info("draining %d requests for up to %g s; a second signal stops at once", len(self.sessions), drain_s)
        self.admission.is_draining = True
        self._changed.set()
        idle = asyncio.Event()
        self.sessions.on_idle = idle.set
        if not len(self.sessions):
            idle.set()
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(event.wait()) for event in (idle, stop_now)]
            await asyncio.wait(waits, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if len(self.sessions):
            logger.warning("%d requests did not finish in time", len(self.sessions))
            self.sessions.abort_all(lambda: Draining("the router stopped before the answer was complete"))
