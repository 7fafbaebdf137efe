"""The histogram of the time between tokens."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from weft.front.monitoring.front_tables import HISTOGRAMS
from weft.front.monitoring.metrics import TokenTimes


def test_the_histogram_shows_what_prometheus_own_histogram_shows() -> None:
    name, text, bounds = HISTOGRAMS[1]
    own, reference = CollectorRegistry(), CollectorRegistry()
    times = TokenTimes(name, text, bounds, "m")
    own.register(times)
    expected = Histogram(f"weft:{name}", text, ["model_name"], buckets=bounds, registry=reference)
    expected.labels("m")
    for seconds, count in ((0.0, 1), (0.001, 2), (0.0011, 1), (0.3, 5), (11.0, 1)):
        times.add(seconds, count)
        for _ in range(count):
            expected.labels("m").observe(seconds)
    assert generate_latest(own) == generate_latest(reference)
