"""What a node's admin port shows: its gauges for Prometheus, its readiness, and the debug dump. `rpc.admin_port` has the port."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, generate_latest

from pdserve.node.service import NodeServicer
from pdserve.rpc.gauge_metrics import NODE_PREFIX, GaugeCollector


class NodeViews:
    """The views of one node. `fault` says why it is not ready; until it is set, the node loads its model."""

    def __init__(self, servicer: NodeServicer) -> None:
        self._servicer = servicer
        self._registry = CollectorRegistry()
        self._registry.register(GaugeCollector(servicer.gauges, NODE_PREFIX))
        self.fault: Callable[[], str] = _loading

    def metrics(self) -> bytes:
        """Return every gauge in Prometheus' text format."""
        return generate_latest(self._registry)

    def why_not_ready(self) -> str:
        """Return why the node cannot serve now; "" if it can."""
        return self.fault()

    def pages(self) -> Mapping[str, Callable[[], Mapping[str, object]]]:
        """Return the other paths."""
        return {"/debug/state": self._servicer.state}


def _loading() -> str:
    return "the node is loading its model"
