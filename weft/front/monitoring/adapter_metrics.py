"""Metrics of LoRA adapters, counted by one API server."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

REQUESTS = (
    "lora_requests",
    "Requests of a LoRA adapter, by state: waiting before the first token, then running.",
)
"""Name and help."""
STATES = ("running", "waiting")
_LINE = re.compile(
    rb'^weft:lora_requests\{.*\badapter="(?P<adapter>(?:[^"\\]|\\.)*)".*state="(?P<state>\w+)".*\} '
    rb"(?P<count>\S+)$",
    re.MULTILINE,
)


class AdapterMetrics(Collector):
    """Collector of the requests of each adapter."""

    def __init__(
        self, model: str, names: Callable[[], list[str]], requests: Callable[[], Iterable[tuple[str, bool]]]
    ) -> None:
        """``names``: returns the names of all adapters. ``requests``: returns (adapter, True after the first
        token) of each open request with an adapter."""
        self._model, self._names, self._requests = model, names, requests

    def collect(self) -> Iterable[Metric]:
        """Yield the number of requests by adapter and state. No metric without adapters."""
        counts = Counter((name, STATES[not begun]) for name, begun in self._requests())
        names = dict.fromkeys([*self._names(), *(name for name, _ in counts)])
        if not names:
            return
        name, text = REQUESTS
        family = GaugeMetricFamily(f"weft:{name}", text, labels=["model_name", "adapter", "state"])
        for adapter in names:
            for state in STATES:
                family.add_metric([self._model, adapter, state], counts[adapter, state])
        yield family


def requests_info(page: bytes, places: int) -> Metric:
    """Return vLLM's ``lora_requests_info``, which gateways read, from the exposition ``page``.

    The value is the present time in seconds. ``places``: value of --max-loras.
    """
    found: dict[str, set[str]] = {state: set() for state in STATES}
    for line in _LINE.finditer(page):
        if float(line["count"]):
            found[line["state"].decode()].add(line["adapter"].decode())
    labels = ["max_lora", *(f"{state}_lora_adapters" for state in STATES)]
    text = "Names of the LoRA adapters of running and waiting requests."
    family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=labels)
    values = [",".join(sorted(found[state])) for state in STATES]
    family.add_metric([str(places), *values], time.time())
    return family
