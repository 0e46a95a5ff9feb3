"""What a node hears and sees of the machines without touching them."""

import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from pdserve.kvtransfer.events import Reopened

EventT = TypeVar("EventT")
_logger = logging.getLogger(__name__)


class Herald(Generic[EventT]):
    """Tells events, and shows gauges as they were at the last event or at the end of the I/O thread's last turn."""

    def __init__(self, on_event: Callable[[EventT], None], measure: Callable[[], Mapping[str, float]]) -> None:
        self._on_event = on_event
        self._measure_gauges = measure
        self.gauges = measure()
        """Replaced as a whole, so that any thread may read it at any time."""

    def publish(self) -> None:
        """Show the gauges of now. Only for the thread that the machines run on."""
        self.gauges = self._measure_gauges()

    def announce(self, event: EventT) -> None:
        """Show the gauges of now, then tell `event`: who hears it sees no older ones. Only for the machines' thread."""
        self.publish()
        self.tell(event)

    def tell(self, event: EventT) -> None:
        """Tell `event`, from any thread. A handler that raises harms nobody else."""
        try:
            self._on_event(event)
        except Exception:
            _logger.exception("the node's handler failed on %s", event)


def log_reopened(event: Reopened) -> None:
    """Say that a transfer goes on although its connection broke: it succeeds, and somebody should look at the network."""
    _logger.warning(
        "transfer %s goes on over a new connection, from its first frame; the last one was lost: %s",
        event.transfer_id.hex(),
        event.because,
    )
