"""What a router tells Prometheus: every gauge of docs/gauges.md, and what became of requests. Names stand in docs/metrics.md.

Latencies are those of the timeline (docs/timeline.md); the gaps between tokens are as clients were given them.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pdserve.core.errors import PdserveError
from pdserve.router.instructions import Answer, Finish
from pdserve.rpc.gauge_metrics import ROUTER_PREFIX, GaugeCollector, Gauges

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_TIME_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))


class Meters:
    """One router's metrics, in a registry of their own. Called from the event loop only."""

    def __init__(self, model: str, gauges: Gauges) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self.registry.register(GaugeCollector(gauges, ROUTER_PREFIX))

        def histogram(name: str, about: str, buckets: Sequence[float], *more: str) -> Histogram:
            return Histogram(name, about, ("model_name", *more), buckets=buckets, registry=self.registry)

        def counter(name: str, about: str, *more: str) -> Counter:
            return Counter(name, about, ("model_name", *more), registry=self.registry)

        self._requests = counter("pdserve_requests", "Generate calls by how they ended.", "outcome", "reason")
        self._prompt_total = counter("pdserve_prompt_tokens", "Prompt tokens of complete answers.")
        self._cached_total = counter("pdserve_cached_prompt_tokens", "Prompt tokens that a prefix cache held.")
        self._output_total = counter("pdserve_generation_tokens", "Tokens of complete answers.")
        self._ttft = histogram("pdserve_time_to_first_token_seconds", "Time to the first token.", LATENCY_BUCKETS_S)
        self._gap = histogram(
            "pdserve_inter_token_latency_seconds", "Gap between tokens of streams, as delivered.", TOKEN_TIME_BUCKETS_S
        )
        self._tpot = histogram(
            "pdserve_request_time_per_output_token_seconds", "Mean time per later token.", TOKEN_TIME_BUCKETS_S
        )
        self._e2el = histogram("pdserve_e2e_request_latency_seconds", "Whole latency.", LATENCY_BUCKETS_S)
        self._stage = histogram("pdserve_request_stage_seconds", "Time in each stage.", LATENCY_BUCKETS_S, "stage")
        self._exposed = histogram(
            "pdserve_kv_transfer_exposed_seconds", "What computing did not hide of KV transfer.", TOKEN_TIME_BUCKETS_S
        )
        self._kv_bytes = counter("pdserve_kv_transfer_bytes", "KV that was handed over for complete answers.")
        self._prompt = histogram("pdserve_request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._output = histogram("pdserve_request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)
        self._http = Counter(
            "pdserve_http_requests", "HTTP requests by path and status.", ("path", "status"), registry=self.registry
        )

    def refused(self, error: PdserveError) -> None:
        """Count a call that got no session."""
        self._requests.labels(self._model, "refused", error.reason).inc()

    def failed(self, error: PdserveError) -> None:
        """Count a call whose answer ended with an error."""
        self._requests.labels(self._model, "failed", error.reason).inc()

    def cancelled(self) -> None:
        """Count a call whose client left before its end."""
        self._requests.labels(self._model, "cancelled", "").inc()

    def gained(self, gap_s: float, num_tokens: int) -> None:
        """Take tokens that came together, `gap_s` after those before them."""
        series = self._gap.labels(self._model)
        for _ in range(num_tokens):
            series.observe(gap_s / num_tokens)

    def answered(self, answer: Answer, ends: Sequence[Finish]) -> None:
        """Take a complete answer. `ends` are those of its sequences; the last one gives the reason."""
        model, timeline = self._model, answer.timeline
        self._requests.labels(model, "finished", ends[-1].reason.name if ends else "").inc()
        self._prompt_total.labels(model).inc(answer.num_prompt_tokens)
        self._cached_total.labels(model).inc(answer.num_cached_tokens or 0)
        self._output_total.labels(model).inc(answer.num_completion_tokens)
        self._prompt.labels(model).observe(answer.num_prompt_tokens)
        self._output.labels(model).observe(answer.num_completion_tokens)
        self._ttft.labels(model).observe(timeline.ttft_s)
        self._e2el.labels(model).observe(timeline.e2el_s)
        if answer.num_completion_tokens > 1:
            self._tpot.labels(model).observe(timeline.tpot_s)
        if timeline.overlapped.kv_bytes:
            self._exposed.labels(model).observe(timeline.overlapped.exposed_transfer_s)
            self._kv_bytes.labels(model).inc(timeline.overlapped.kv_bytes)
        for stage in timeline.stages:
            self._stage.labels(model, str(stage.name)).observe(max(0.0, stage.duration_s))

    def http(self, path: str, status: int) -> None:
        """Count an HTTP answer. `path` must be one of few."""
        self._http.labels(path, str(status)).inc()

    def render(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
