"""The process of a decode node."""

from collections.abc import Callable

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.clock import Clock
from pdserve.core.hold import parse_hold
from pdserve.core.node_settings import DecodeSettings
from pdserve.node.desk import Desk
from pdserve.node.legs import Legs
from pdserve.node.loading import describe_process, load_engine
from pdserve.node.process import serve_node
from pdserve.rpc.ports import check_port


async def serve(settings: DecodeSettings) -> None:
    """Run a decode node until it is told to stop. Raises SetupError if it cannot start."""
    parse_hold(settings.hold_at)
    check_port(settings.host, settings.kv_port, "--kv-port")

    async def make_desk(legs: Legs, clock: Clock, load_changed: Callable[[], None]) -> tuple[Desk, ProcessInfo]:
        engine = await load_engine(settings)
        from pdserve.decode_node.desk import DecodeDesk  # torch: only after health answers

        process = describe_process(Role.DECODE, settings, engine)
        return DecodeDesk(settings, engine, process.incarnation, legs, clock, load_changed), process

    await serve_node(settings, make_desk)
