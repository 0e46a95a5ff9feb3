"""The HTTP port: uvicorn on the router's own event loop, bound before the router says that it listens."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from pdserve.core.errors import AddressInUse
from pdserve.rpc.ports import check_port

BACKLOG = 2048
MAX_CONNECTIONS = 8192
"""Open connections, idle ones included; uvicorn answers 503 beyond it."""
IDLE_S = 75
"""Time that an idle connection is kept."""


class QuietServer(uvicorn.Server):
    """A server that leaves signals to the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


class HttpListener:
    """One port. `serve` is its whole life."""

    def __init__(self, app: ASGIApp, host: str, port: int, grace_s: float) -> None:
        """Bind the port; raises AddressInUse if it is taken. `grace_s` is what open requests get once it stops."""
        check_port(host, port, "--http-port")
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise AddressInUse(
                f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
                hint="another process took the port just now; choose another --http-port",
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self._server = QuietServer(
            uvicorn.Config(
                app,
                loop="none",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )

    async def serve(self) -> None:
        """Serve until `stop`. However it ends, nothing listens afterwards."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            for server in getattr(self._server, "servers", ()):
                server.close()

    def stop(self) -> None:
        """Take no new connection, let open requests end within the grace, then end."""
        self._server.should_exit = True

    def close(self) -> None:
        """Give the port back, if `serve` never ran."""
        self._socket.close()
