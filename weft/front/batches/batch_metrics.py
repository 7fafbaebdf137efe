"""Metrics of batches. Only the API server that runs the batches has gauges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.front.monitoring.front_tables import BATCH_BEHIND, BATCH_LINES, BATCH_STATUS
from weft.front.monitoring.metrics import Metrics


class BatchCounts(Collector):
    """Counter of lines, and gauges of the store's last counts."""

    def __init__(self, metrics: Metrics) -> None:
        self._model = metrics.model
        self._lines = Counter(
            f"weft:{BATCH_LINES[0]}", BATCH_LINES[1], ["model_name", "outcome"], registry=metrics.registry
        )
        self._batches: Mapping[str, int] = {}
        self._behind = 0.0
        metrics.registry.register(self)

    def add(self, outcome: str, count: int) -> None:
        """Count lines with an outcome: completed, failed, expired or cancelled."""
        if count > 0:
            self._lines.labels(self._model, outcome).inc(count)

    def show(self, batches: Mapping[str, int], behind: float) -> None:
        """Set the gauges. ``batches``: status -> number. ``behind``: age in seconds of the oldest batch that
        has not ended."""
        self._batches, self._behind = batches, behind

    def clear(self) -> None:
        """Show no gauges: another API server runs the batches."""
        self._batches = {}

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges, only of the API server that runs batches."""
        if not self._batches:
            return
        family = GaugeMetricFamily(
            f"weft:{BATCH_STATUS[0]}", BATCH_STATUS[1], labels=["model_name", "status"]
        )
        for status, count in self._batches.items():
            family.add_metric([self._model, status], count)
        yield family
        behind = GaugeMetricFamily(f"weft:{BATCH_BEHIND[0]}", BATCH_BEHIND[1], labels=["model_name"])
        behind.add_metric([self._model], self._behind)
        yield behind
