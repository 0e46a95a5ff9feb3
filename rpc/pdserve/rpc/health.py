"""`grpc.health.v1`, served so that no watcher can hold up another, nor the process that tells its health.

grpcio-health-checking's own servicer writes to its watchers while it holds the lock that telling a new state needs: one that
reads nothing kept a router from ever becoming ready, and from stopping.
"""

import asyncio
from collections import deque
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

HEALTH_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

MAX_WATCHERS = 64

Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """The state of each service by name."""

    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._is_over = False
        self._watches: deque[asyncio.Event] = deque()
        """One for each watcher, oldest first; set for one that has to make room."""

    def set(self, service: str, state: int) -> None:
        """Tell a service's state to whoever asks or watches. Nothing changes after `shut_down`."""
        if not self._is_over:
            self._states[service] = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def shut_down(self) -> None:
        """Tell that no service is served any more."""
        for service in self._states:
            self.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._is_over = True

    async def Check(  # noqa: N802 - the contract's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Return a service's state, NOT_FOUND for one that is unknown."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(  # noqa: N802 - the contract's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        """Tell a service's state, and each later one; what changes while the client does not read is passed over.

        Watchers are bounded, since they need no key: of too many the oldest is told UNAVAILABLE, and may ask again.
        """
        ousted = asyncio.Event()
        self._watches.append(ousted)
        if len(self._watches) > MAX_WATCHERS:
            self._watches.popleft().set()
        watching = asyncio.ensure_future(self._tell(request.service, context))
        leaving = asyncio.ensure_future(ousted.wait())
        try:
            await asyncio.wait({watching, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching
        finally:
            for task in (watching, leaving):
                task.cancel()
            await asyncio.gather(watching, leaving, return_exceptions=True)
            if not ousted.is_set():
                self._watches.remove(ousted)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "too many watch; watch again")

    async def _tell(self, service: str, context: Context) -> None:
        last: int | None = None
        while True:
            changed = self._changed
            state = self._states.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if state != last:
                await context.write(health_pb2.HealthCheckResponse(status=state))
                last = state
                continue  # the state may have changed meanwhile
            await changed.wait()
