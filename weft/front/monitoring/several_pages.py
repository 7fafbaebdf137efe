"""Metrics of a server of several models: one page with the metrics of the process and of each model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.control.models import Entry, ModelState
from weft.front.monitoring.front_tables import (
    BATCH_BEHIND,
    BATCH_LINES,
    BATCH_STATUS,
    EVENTS,
    HTTP_SECONDS,
    MODELS,
    PROCESS,
    SPANS_DROPPED,
)
from weft.front.monitoring.metrics import Metrics, labelled

NO_LINKS: Any = SimpleNamespace(
    asleep=0,
    instances=(),
    bad_frames=0,
    restarts=0,
    pauses=0,
    failovers=0,
    paired=0,
    local_prefills=0,
    open_sequences=0,
    fleet=SimpleNamespace(
        late_events=0,
        encodes={},
        router=SimpleNamespace(decisions={}, weights=0),
        table=SimpleNamespace(unpaired=0),
    ),
)
"""Links to no engines, for the metrics of the process."""
_OF_PROCESS = frozenset(
    (*(f"weft:{name}" for name, _, labels in EVENTS if "model_name" not in labels), *PROCESS)
) | {f"weft:{HTTP_SECONDS[0]}", f"weft:{SPANS_DROPPED[0]}"}
"""Families that the process has once."""
_OF_BOTH = frozenset(
    f"weft:{name}" for name in ("request_failure", *MODELS, BATCH_LINES[0], BATCH_STATUS[0], BATCH_BEHIND[0])
)
"""Families of the process with a label for the model. Requests without a model, and batches, which may have
lines for several models, have an empty label."""


class Models(Protocol):
    """The models of a server (``weft.front.requests.models.several_models.SeveralModels``)."""

    table: Any

    @property
    def loads(self) -> Mapping[str, int]: ...


class ModelsCollector(Collector):
    """Collector of the states of all models."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of ``MODELS``."""
        entries: dict[str, Entry] = self._models.table.entries
        (state, state_text), (size, size_text), (loads, loads_text) = (
            (name, text) for name, (text, _, _) in MODELS.items()
        )
        states = GaugeMetricFamily(f"weft:{state}", state_text, labels=["model_name", "state"])
        sizes = GaugeMetricFamily(f"weft:{size}", size_text, labels=["model_name"])
        counts = CounterMetricFamily(f"weft:{loads}", loads_text, labels=["model_name"])
        for name, entry in entries.items():
            for one in ModelState:
                states.add_metric([name, one.value], float(entry.state is one))
            sizes.add_metric([name], 0.0 if entry.state is ModelState.COLD else float(entry.cost))
            counts.add_metric([name], float(self._models.loads[name]))
        yield from (states, sizes, counts)


class _Families(CollectorRegistry):
    """Registry of collected metrics."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def page(process: Metrics, models: Iterable[Metrics]) -> bytes:
    """Return one exposition: each family once, with the samples of the process or of all models."""
    made = list(models)
    return generate_latest(
        _Families(_merged([*_own_families(process, made), *_engine_families(process, made)]))
    )


def own(process: Metrics, models: Iterable[Metrics]) -> bytes:
    """Return the metrics that this API server counts itself, without the metrics of engines."""
    return generate_latest(_Families(_merged(_own_families(process, models))))


def render_all(process: Metrics, models: Iterable[Metrics], pages: Mapping[str, bytes]) -> bytes:
    """Return the exposition of several API servers. ``pages``: name -> ``own`` of each."""
    return generate_latest(_Families(_merged(_engine_families(process, models)))) + labelled(pages)


def _own_families(process: Metrics, models: Iterable[Metrics]) -> Iterable[Metric]:
    for family in process.registry.collect():
        if family.name in _OF_PROCESS | _OF_BOTH:
            yield family
    for metrics in models:
        for family in metrics.registry.collect():
            if family.name not in _OF_PROCESS:
                yield family


def _engine_families(process: Metrics, models: Iterable[Metrics]) -> Iterable[Metric]:
    for family in process.engines.collect():
        if family.name in _OF_BOTH:
            yield family
    for metrics in models:
        yield from (family for family in metrics.engines.collect() if family.name not in _OF_PROCESS)


def _merged(families: Iterable[Metric]) -> Iterable[Metric]:
    """Return each family once, with all samples."""
    made: dict[str, Metric] = {}
    for family in families:
        whole = made.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        whole.samples += family.samples
    return made.values()
