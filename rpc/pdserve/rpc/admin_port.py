"""The admin port of a process: metrics, readiness and debug views. It asks for no key: where it listens is its guard."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdserve.core.process_settings import LOOPBACK_HOSTS, ProcessSettings
from pdserve.rpc.bounded_calls import UNREAD_S
from pdserve.rpc.gauge_metrics import METRICS_TYPE
from pdserve.rpc.http_listener import HttpListener

OPTION = "--admin-port"
MAX_CONNECTIONS = 64
GRACE_S = 1.0

logger = logging.getLogger(__name__)

Json = Mapping[str, object]


class AdminViews(Protocol):
    """What a process shows."""

    def metrics(self) -> bytes:
        """Return everything in Prometheus' text format."""
        ...

    def why_not_ready(self) -> str:
        """Return why no work can be done now; "" if it can."""
        ...

    def pages(self) -> Mapping[str, Callable[[], Json]]:
        """Return the other paths, each with what makes its JSON."""
        ...


@asynccontextmanager
async def admin_port(settings: ProcessSettings, views: AdminViews) -> AsyncIterator[dict[str, str]]:
    """Serve the admin port that the settings ask for while the context is open; yields its address by name, to be announced.

    Raises AddressInUse if the port is taken.
    """
    if settings.admin_port is None:
        yield {}
        return
    host = settings.admin_host
    listener = HttpListener(
        admin_app(views), host, settings.admin_port, GRACE_S, UNREAD_S, option=OPTION, max_connections=MAX_CONNECTIONS
    )
    logger.info("admin port on http://%s:%d", host, listener.port)
    if host not in LOOPBACK_HOSTS:
        logger.warning("whoever reaches the admin port sees nodes, load and labels of requests; it asks for no key")
    serving = asyncio.create_task(listener.serve())
    try:
        yield {"admin": f"{host}:{listener.port}"}
    finally:
        listener.stop()
        await serving


def admin_app(views: AdminViews) -> Starlette:
    """Return the ASGI application of the views."""

    async def metrics(request: Request) -> Response:  # noqa: ARG001 - Starlette's signature
        return Response(views.metrics(), headers={"content-type": METRICS_TYPE})

    async def health(request: Request) -> Response:  # noqa: ARG001
        return health_response(views.why_not_ready())

    def page(path: str, make: Callable[[], Json]) -> Route:
        async def show(request: Request) -> Response:  # noqa: ARG001
            return JSONResponse(make())

        return Route(path, show, methods=["GET"])

    routes = [Route("/metrics", metrics, methods=["GET"]), Route("/health", health, methods=["GET"])]
    return Starlette(routes=[*routes, *(page(path, make) for path, make in views.pages().items())])


def health_response(why_not_ready: str) -> Response:
    """Return 200, or 503 with the reason."""
    if why_not_ready:
        return JSONResponse({"status": "not ready", "reason": why_not_ready}, status_code=503)
    return JSONResponse({"status": "ready"})
