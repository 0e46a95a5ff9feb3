"""An HTTP port: uvicorn on the process's own event loop, bound before the process says that it listens."""

import contextlib
import resource
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from pdserve.core.errors import AddressInUse
from pdserve.rpc.http_connection import BoundedConnection
from pdserve.rpc.http_tls import RenewedContext
from pdserve.rpc.ports import check_port
from pdserve.rpc.tls import TlsSource

BACKLOG = 2048
MAX_CONNECTIONS = 8192
"""Open connections, idle ones included, if the process may have three times as many descriptors; 503 beyond it."""
MAX_DESCRIPTORS = 65_536
MAX_INT = 2**31 - 1
IDLE_S = 75
"""Time that an idle connection is kept."""


class QuietServer(uvicorn.Server):
    """A server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


class HttpListener:
    """One port. `serve` is its whole life."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        grace_s: float,
        unread_s: float,
        *,
        tls: TlsSource | None = None,
        option: str = "--http-port",
        max_connections: int | None = None,
    ) -> None:
        """Bind the port; raises AddressInUse, naming `option`, if it is taken. `grace_s` is what open requests get once it stops.

        A client that leaves sent bytes untaken for `unread_s`, a complete answer too, loses its connection to the kernel. With
        `tls` the port speaks HTTPS alone. Without `max_connections` there may be `connection_limit()` of them.
        """
        check_port(host, port, option)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
                self._socket.setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(round(unread_s * 1e3), MAX_INT)
                )
            self._socket.bind(address)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise AddressInUse(
                f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
                hint=f"another process took the port just now; choose another {option}",
            ) from None
        self.port: int = self._socket.getsockname()[1]
        limit = max_connections or connection_limit()
        context = None if tls is None else RenewedContext.of(tls, limit * 3 // 2)

        class Connection(BoundedConnection):
            """A connection of this port."""

        Connection.unread_s = unread_s
        self._server = QuietServer(
            uvicorn.Config(
                app,
                loop="none",
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                limit_concurrency=limit,
                ssl_context_factory=None if context is None else lambda *_: context,
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


def connection_limit() -> int:
    """Return how many connections to serve: a third of the descriptors that the process may have, which it asks for first.

    The rest is for gRPC, for the nodes, and for connections that are told 503.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 3)
