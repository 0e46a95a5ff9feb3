"""What the router's admin port shows; `rpc.admin_port` has the port."""

from collections.abc import Callable, Mapping

from pdserve.core.api_keys import ON_LOOPBACK
from pdserve.router.answering import Answering
from pdserve.router.views import load_json, state_json


class RouterViews:
    """The views of a router's admin port."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def metrics(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return self._answering.meters.render()

    def why_not_ready(self) -> str:
        """Return why requests cannot be served now; "" if they can."""
        return self._answering.why_not_ready(ON_LOOPBACK)

    def pages(self) -> Mapping[str, Callable[[], Mapping[str, object]]]:
        """Return the other paths."""
        return {
            "/load": lambda: load_json(self._answering),
            "/debug/state": lambda: state_json(self._answering),
        }
