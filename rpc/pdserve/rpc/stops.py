"""The two signals that end a service: the first asks for a drain, the second for an end at once."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Counts SIGTERM and SIGINT while `installed`."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def take(self) -> None:
        """Count one signal."""
        (self.second if self.first.is_set() else self.first).set()

    @contextmanager
    def installed(self) -> Iterator["StopSignals"]:
        """Listen on the running loop while the context is open."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.take)
        try:
            yield self
        finally:
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)
