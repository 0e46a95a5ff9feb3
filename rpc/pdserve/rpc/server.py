"""A gRPC server that binds alone, reports health, and lists its services."""

import json
import os
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import AddressInUse
from pdserve.rpc.bounded_calls import UNREAD_S, BoundedCalls
from pdserve.rpc.health import HEALTH_NAME, Health
from pdserve.rpc.options import ServerBounds, server_options
from pdserve.rpc.ports import check_port
from pdserve.rpc.tls import TlsSource, server_credentials

LIVENESS = "liveness"
"""Health service name that is SERVING as long as the event loop runs; "" tells readiness."""


class GrpcServer:
    """One server on one port: services, `grpc.health.v1` and reflection.

    Readiness is the health of "" and starts as NOT_SERVING; liveness is the health of "liveness". Clients that leave what they
    are sent unread for `unread_s` lose their calls. With `tls` the port speaks nothing else, health and reflection included.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        bounds: ServerBounds | None = None,
        unread_s: float = UNREAD_S,
        tls: TlsSource | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._server = grpc.aio.server(
            options=server_options(bounds or ServerBounds()),
            interceptors=(BoundedCalls(unread_s, hurried=f"/{reflection.SERVICE_NAME}/"), *interceptors),
        )
        self._host, self._tls = host, tls
        self._asked_port = port
        self._names = [reflection.SERVICE_NAME, HEALTH_NAME]
        self._health = Health()
        self.port = 0
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, name: str, register: Callable[[grpc.aio.Server], None]) -> None:
        """Add the service of full name `name`; `register` is given the server."""
        self._names.append(name)
        register(self._server)

    async def start(self) -> None:
        """Bind and serve. Raises AddressInUse if the port is taken."""
        check_port(self._host, self._asked_port, "--port")
        reflection.enable_server_reflection(self._names, self._server)
        await self.set_ready(False)
        self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self.port = self._bind(f"{host}:{self._asked_port}")
        except RuntimeError:
            raise AddressInUse(
                f"cannot listen on {host}:{self._asked_port}",
                hint="another process took the port just now; choose another --port",
            ) from None
        await self._server.start()

    def _bind(self, address: str) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, server_credentials(self._tls))

    async def set_ready(self, ready: bool) -> None:
        """Tell readiness."""
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("", state)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, wait up to `grace_s` for running ones, then cut them."""
        self._health.shut_down()
        await self._server.stop(grace_s)


def announce(ready_fd: int | None, addresses: dict[str, str]) -> None:
    """Write the bound addresses as one JSON line to the descriptor that a supervisor gave, and close it."""
    if ready_fd is None:
        return
    with os.fdopen(ready_fd, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(addresses) + "\n")
