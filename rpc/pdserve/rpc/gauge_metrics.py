"""Every gauge of a process in Prometheus' text format: `sessions.decoding` of a router is `pdserve_router_sessions_decoding`."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the text."""
ROUTER_PREFIX, NODE_PREFIX = "pdserve_router_", "pdserve_node_"

Gauges = Callable[[], Mapping[str, float]]


class GaugeCollector(Collector):
    """The gauges of this moment, each under its own name behind `prefix`."""

    def __init__(self, gauges: Gauges, prefix: str) -> None:
        self._gauges, self._prefix = gauges, prefix

    def describe(self) -> list[Metric]:
        """Name nothing beforehand: gauges are read when they are asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; those that only grow are counters."""
        for name, value in self._gauges().items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(metric_name(name, self._prefix), f"Gauge {name} of docs/gauges.md.", value=value)


def metric_name(gauge: str, prefix: str) -> str:
    """Return the metric's name of a gauge."""
    return prefix + gauge.replace(".", "_")
