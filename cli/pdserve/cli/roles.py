"""`pdserve router`, `pdserve prefill`, `pdserve decode`: one process each, as a pod would run it."""

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pdserve.core.errors import Cancelled
from pdserve.core.logs import set_up_logs
from pdserve.core.node_settings import DecodeSettings, NodeSettings, PrefillSettings
from pdserve.core.process_settings import ProcessSettings
from pdserve.core.router_settings import RouterSettings
from pdserve.core.run_secret import find
from pdserve.core.settings import environment_warnings, load_settings

S = TypeVar("S", bound=ProcessSettings)

logger = logging.getLogger(__name__)


def run_router(given: Mapping[str, Any], config: Path | None) -> None:
    """Run a router until it is told to stop."""
    settings = load_settings(RouterSettings, given, config)
    start_logs(settings)
    from pdserve.router.server import serve

    run_service(serve, settings)


def run_prefill(given: Mapping[str, Any], config: Path | None) -> None:
    """Run a prefill node until it is told to stop."""
    settings = load_settings(PrefillSettings, given, config)
    start_logs(settings)
    limit_threads(settings)
    from pdserve.prefill_node.server import serve

    run_service(serve, settings)
    leave()


def run_decode(given: Mapping[str, Any], config: Path | None) -> None:
    """Run a decode node until it is told to stop."""
    settings = load_settings(DecodeSettings, given, config)
    start_logs(settings)
    limit_threads(settings)
    from pdserve.decode_node.server import serve

    run_service(serve, settings)
    leave()


def start_logs(settings: ProcessSettings) -> None:
    """Set the logs up, and begin them with variables of the environment that are probably misspelt.

    gRPC's own core would write beside them, in a form of its own, that a peer it lost said goodbye; its errors are let through.
    It reads the variable once, when it is first used.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    set_up_logs(settings.table, settings.log_format, settings.log_level)
    for warning in (*environment_warnings().values(), *settings.warnings):
        logger.warning("%s", warning)
    take_local_secret(settings)


def take_local_secret(settings: ProcessSettings) -> None:
    """Give a process on loopback that was told no secret that of the local cluster that runs, if it is clear which."""
    if settings.secret is not None or settings.needs_secret:
        return
    told = (*settings.prefill, *settings.decode) if isinstance(settings, RouterSettings) else ()
    found = find(told)
    if found.warning:
        logger.warning("%s", found.warning)
    if found.run is not None:
        settings.take_secret(found.run.secret)
        logger.info("the cluster secret is that of the local cluster: %s", found.run.path)


def limit_threads(settings: NodeSettings) -> None:
    """Tell OpenMP how many threads there are; it reads this once, when torch is imported.

    With several threads waiting must not spin: on a busy machine a spinning barrier turns milliseconds into seconds.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(settings.threads)
    if settings.threads > 1:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def leave() -> None:
    """End a node's process here and now; all that it held is closed.

    The interpreter's own end would take torch down first: seconds on a busy machine, and an abort while a thread still loads a
    model that nobody wants any more.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_service(serve: Callable[[S], Awaitable[None]], settings: S) -> None:
    """Run a service's coroutine on uvloop to its end."""
    import uvloop

    async def main() -> None:
        await serve(settings)

    try:
        uvloop.run(main())
    except KeyboardInterrupt:
        raise Cancelled("interrupted before the service could take the signal") from None
