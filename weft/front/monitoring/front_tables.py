"""Tables of the metrics of an API server, and the metrics of the process."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from weft.front.monitoring import adapter_metrics
from weft.tracing.writer import SpanWriter

_LONG = (2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, *_LONG)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY_BOUNDS = ((*_TTFT, math.inf), (*_ITL, math.inf))
"""Upper bounds of the buckets of ``Metrics.latencies``."""
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)
_HTTP = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)

#: (name, help, buckets) of histograms measured by the API server.
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Seconds from the arrival of a request to its first token.", _TTFT),
    (
        "inter_token_latency_seconds",
        "Seconds between two tokens of one sequence, as received from the engine.",
        _ITL,
    ),
    ("e2e_request_latency_seconds", "Seconds from the arrival of a request to its last token.", _E2E),
    ("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
    ("request_generation_tokens", "Generated tokens of a request, over all choices.", _TOKENS),
    ("request_max_num_generation_tokens", "Generated tokens of a request's longest choice.", _TOKENS),
    ("request_decode_time_seconds", "Seconds from the first token of a request to its last.", _E2E),
    (
        "request_time_per_output_token_seconds",
        "Mean seconds between the tokens of a request's longest choice.",
        _ITL,
    ),
    ("request_params_n", "Parameter n of a request.", _CHOICES),
    ("request_params_max_tokens", "Maximum output tokens per choice of a request.", _TOKENS),
    (
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were computed, not found in the prefix cache.",
        _TOKENS,
    ),
)
EVENTS = (
    ("request_success", "Choices that ended without an error.", ("model_name", "finished_reason")),
    ("request_failure", "Requests that ended in an error.", ("model_name", "code")),
    ("http_requests", "HTTP requests answered.", ("route", "method", "status")),
    ("prefix_cache_misses", "Prompts, by the reason why the cached prefix ended.", ("model_name", "reason")),
)
HTTP_SECONDS = (
    "http_request_duration_seconds",
    "Seconds of an HTTP request, from its headers to the last byte of the answer.",
    ("route", "method"),
    _HTTP,
)

#: name -> (help, type) of the API server process, with the names of every Prometheus client.
PROCESS = {
    "process_cpu_seconds": ("CPU seconds of the API server process.", "counter"),
    "process_resident_memory_bytes": ("Resident memory of the API server process, in bytes.", "gauge"),
    "process_virtual_memory_bytes": ("Virtual memory of the API server process, in bytes.", "gauge"),
    "process_start_time_seconds": ("Start of the API server process, in seconds since 1970.", "gauge"),
    "process_open_fds": ("Open files of the API server process.", "gauge"),
    "process_max_fds": ("Maximum number of open files of the API server process.", "gauge"),
}


#: name -> (help, type, labels) of a server of several models.
MODELS = {
    "model_state": ("1 for the present state of a model, else 0.", "gauge", "model_name,state"),
    "model_memory_bytes": ("Bytes of memory of a model; 0 while it is unloaded.", "gauge", "model_name"),
    "model_loads": ("Loads of a model that succeeded.", "counter", "model_name"),
}
BATCH_LINES = (
    "batch_lines",
    "Lines of batches with an output, by outcome: completed, failed, expired, cancelled.",
)
BATCH_STATUS = ("batches", "Batches of the folder, by status.")
BATCH_BEHIND = (
    "batch_seconds_behind",
    "Age in seconds of the oldest batch that has not ended; 0 without one.",
)
SPANS_DROPPED = ("front_spans_dropped", "Spans of traced requests that the API server did not write or push.")


class ProcessMetrics(Collector):
    """Collector of the metrics of this process. Only Linux has the metrics of ``PROCESS``."""

    def __init__(self, model: str, spans: SpanWriter | None) -> None:
        """``model``: value of the label ``model_name``. ``spans``: None without tracing."""
        self._model, self._spans = model, spans
        self._source = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterable[Metric]:
        """Yield the dropped spans, and the metrics of ``PROCESS`` with the help texts of ``PROCESS``."""
        name, text = SPANS_DROPPED
        dropped = CounterMetricFamily(f"weft:{name}", text, labels=["model_name"])
        dropped.add_metric([self._model], 0 if self._spans is None else self._spans.dropped)
        yield dropped
        for family in self._source.collect():
            text, kind = PROCESS[family.name]
            of = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield of(family.name, text, value=family.samples[0].value)


def describe() -> list[str]:
    """Return the lines of ``docs/metrics.txt`` for the tables of this module. ``-``: no labels."""
    lines = [f"weft:{name}_total counter {','.join(labels)}" for name, _, labels in EVENTS]
    lines += [f"weft:{name} histogram model_name {_bounds(buckets)}" for name, _, buckets in HISTOGRAMS]
    http, _, http_labels, seconds = HTTP_SECONDS
    lines.append(f"weft:{http} histogram {','.join(http_labels)} {_bounds(seconds)}")
    lines.append(f"weft:{SPANS_DROPPED[0]}_total counter model_name")
    lines.append(f"weft:{adapter_metrics.REQUESTS[0]} gauge model_name,adapter,state")
    for name, (_, kind, shown) in MODELS.items():
        lines.append(f"weft:{name}{'_total' * (kind == 'counter')} {kind} {shown}")
    lines.append(f"weft:{BATCH_LINES[0]}_total counter model_name,outcome")
    lines.append(f"weft:{BATCH_STATUS[0]} gauge model_name,status")
    lines.append(f"weft:{BATCH_BEHIND[0]} gauge model_name")
    for name, (_, kind) in PROCESS.items():
        lines.append(f"{name}_total counter -" if kind == "counter" else f"{name} gauge -")
    return lines


def _bounds(buckets: tuple[float, ...]) -> str:
    return ",".join(f"{bound:g}" for bound in buckets)
