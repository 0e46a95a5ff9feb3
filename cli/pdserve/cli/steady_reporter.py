"""Events of a cluster on a stream that may fail: a cluster never ends, or hangs, because of what shows it."""

import signal
from collections.abc import Callable

from pdserve.cli.events import Event, Reporter


class SteadyReporter:
    """Passes everything on to `reporter`.

    Once nobody reads (`pdserve up | head`), one SIGTERM to this process asks for a drain and the rest goes unsaid. What a full
    disk refuses is lost, or written later from the stream's buffer; accepted requests do not end for it.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._is_read = True

    def event(self, event: Event) -> None:
        """Show one event."""
        self._say(lambda: self._reporter.event(event))

    def log(self, name: str, line: str) -> None:
        """Show one line that process `name` wrote."""
        self._say(lambda: self._reporter.log(name, line))

    def _say(self, say: Callable[[], None]) -> None:
        if not self._is_read:
            return
        try:
            say()
        except BrokenPipeError:
            self._is_read = False
            signal.raise_signal(signal.SIGTERM)
        except OSError:
            # Not a loss for the cluster; and there is no other place to tell it.
            return
