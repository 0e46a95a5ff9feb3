"""The process of a prefill node."""

from collections.abc import Callable

from pdserve.core.build import ProcessInfo, Role
from pdserve.core.clock import Clock
from pdserve.core.hold import parse_hold
from pdserve.core.node_settings import PrefillSettings
from pdserve.node.desk import Desk
from pdserve.node.legs import Legs
from pdserve.node.loading import describe_process, load_engine
from pdserve.node.process import serve_node


async def serve(settings: PrefillSettings) -> None:
    """Run a prefill node until it is told to stop. Raises SetupError if it cannot start."""
    parse_hold(settings.hold_at)

    async def make_desk(legs: Legs, clock: Clock, load_changed: Callable[[], None]) -> tuple[Desk, ProcessInfo]:
        engine = await load_engine(settings)
        from pdserve.prefill_node.desk import PrefillDesk  # torch: only after health answers

        process = describe_process(Role.PREFILL, settings, engine)
        return PrefillDesk(settings, engine, process.incarnation, legs, clock, load_changed), process

    await serve_node(settings, make_desk)
