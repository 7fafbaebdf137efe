"""Prometheus metrics under ``weft:``, with names known to dashboards of other servers.

The API server counts its own observations (times, outcomes, HTTP answers) here. Counts of an engine process
come from the last heartbeat before each scrape. ``python -m weft.front.monitoring.metrics >
docs/metrics.txt`` updates the checked-in list.
"""

from __future__ import annotations

import itertools
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.control.links.links import Links
from weft.front.monitoring import front_tables, overlap_metrics, tier_metrics
from weft.front.monitoring.front_tables import EVENTS, HISTOGRAMS, HTTP_SECONDS
from weft.front.monitoring.overlap_metrics import overlap_rows
from weft.front.monitoring.tier_metrics import tier_families
from weft.front.monitoring.transport_metrics import SENT, sent_by_transport
from weft.tracing.writer import SpanWriter
from weft.types.messages import BYTES, SECONDS, STEP_TOKENS, EngineStats, Measures, TransferStats

disable_created_metrics()  # type: ignore[no-untyped-call]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: name -> (help, value of an EngineStats). Gauges show the present state.
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Sequences that have a slot.", lambda s: s.running),
    "num_requests_waiting": ("Sequences that wait for a slot.", lambda s: s.waiting),
    "kv_cache_usage_perc": ("Used fraction of the fullest KV cache pool, 0 to 1.", lambda s: s.kv_usage),
    "free_slots": ("Slots without a sequence.", lambda s: s.free_slots),
    "image_embedding_bytes": (
        "Bytes of image embeddings cached by one rank.",
        lambda s: s.embedding_bytes,
    ),
    "image_embedding_host_bytes": (
        "Bytes of image embeddings cached by one rank in host memory, the second tier.",
        lambda s: s.embedding_host_bytes,
    ),
}
#: Counters, since the start of the engine process.
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prompt_tokens": ("Prompt tokens, computed or found in the prefix cache.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.generation_tokens),
    "prefix_cache_queries": ("Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    "prefix_cache_hits": ("Tokens found in the prefix cache.", lambda s: s.prefix_hits),
    "num_preemptions": (
        "Preemptions: a running sequence lost its slot and cache blocks, and is recomputed.",
        lambda s: s.preemptions,
    ),
    "engine_steps": ("Forward passes.", lambda s: s.steps),
    "engine_prefill_rows": ("Prefill rows in forward passes.", lambda s: s.prefill_rows),
    "engine_prefill_tokens": ("Tokens of prefill rows in forward passes.", lambda s: s.prefill_tokens),
    "engine_decode_rows": ("Decode rows in forward passes.", lambda s: s.decode_rows),
    "engine_mixed_steps": ("Forward passes with prefill and decode rows.", lambda s: s.mixed_steps),
    "spec_decode_num_draft_tokens": ("Draft tokens verified.", lambda s: sum(s.drafts)),
    "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", lambda s: sum(s.drafts_accepted)),
    "engine_idle_steps": (
        "Forward passes without rows, run because other replicas of the expert-parallel group had rows.",
        lambda s: s.idle_steps,
    ),
    "images_encoded": ("Images encoded by the vision tower.", lambda s: s.images_encoded),
    "image_cache_hits": ("Images whose embedding was found in the cache.", lambda s: s.image_hits),
    "image_encode_seconds": (
        "Seconds that rank 0 spent on encoding images; on a GPU, on launching the encoding.",
        lambda s: s.encode_seconds,
    ),
    "row_errors": ("Sequences that failed because of NaN or infinite logits.", lambda s: s.row_errors),
    "grammar_constrained_steps": (
        "Forward passes in which a grammar constrained at least one row.",
        lambda s: s.constrained_steps,
    ),
    "routed_experts_tokens": (
        "Computed tokens whose experts were recorded, because a request returns its routed experts.",
        lambda s: s.routed_tokens,
    ),
    "grammar_mask_seconds": (
        "Seconds spent on computing grammar masks, mostly while the device computed.",
        lambda s: s.mask_seconds,
    ),
    "grammar_compiled": (
        "Grammars compiled, or found in the cache of compiled grammars.",
        lambda s: s.grammars_compiled,
    ),
    "grammar_errors": ("Sequences that failed because of a grammar error.", lambda s: s.grammar_errors),
    "group_recoveries": ("Recoveries of the group after the loss of a rank.", lambda s: s.recoveries),
    "num_requeued": (
        "Sequences that were requeued by a recovery of the group, and recomputed.",
        lambda s: s.requeued,
    ),
    "overlapped_steps": ("Steps computed in two micro-batches.", lambda s: s.overlapped_steps),
    "communication_seconds": (
        "Seconds in which collectives of rank 0 were running.",
        lambda s: s.communication_seconds,
    ),
    "communication_hidden_seconds": (
        "Seconds of communication that overlapped with compute.",
        lambda s: s.communication_hidden_seconds,
    ),
    "engine_spans_dropped": (
        "Spans of traced requests that the engine process did not write or push.",
        lambda s: s.spans_dropped,
    ),
    "head_bad_frames": ("Invalid frames dropped by the engine process.", lambda s: s.bad_frames),
}


#: Counters per position of a draft after the token verified with the draft, from 0.
_PLACES: dict[str, tuple[str, Callable[[EngineStats], tuple[int, ...]]]] = {
    "spec_decode_num_draft_tokens_per_pos": (
        "Draft tokens verified, by position in the draft.",
        lambda s: s.drafts,
    ),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Draft tokens accepted, by position in the draft.",
        lambda s: s.drafts_accepted,
    ),
}

#: Gauges of engine processes with a role; below, the same for counters.
_TRANSFER_GAUGES: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "transfers_awaiting": (
        "Sequences that wait for another group to compute the prompt.",
        lambda s: s.blocked,
    ),
    "transfers_fetching": ("Sequences that are receiving KV cache blocks.", lambda s: s.fetching),
    "transfers_open": ("Open KV cache transfers.", lambda s: s.open),
    "transfers_blocks_on_hold": ("KV cache blocks pinned by a transfer.", lambda s: s.pinned_blocks),
}
_TRANSFERS: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "transfers_done": ("KV cache transfers that succeeded.", lambda s: s.done),
    "transfers_failed": ("KV cache transfers that failed.", lambda s: s.failed),
    "transfers_corrupt": ("KV cache transfers that failed because of a wrong digest.", lambda s: s.corrupt),
    "transfers_sent_bytes": ("Bytes of KV cache sent.", lambda s: s.sent_bytes),
    "transfers_received_bytes": ("Bytes of KV cache received.", lambda s: s.received_bytes),
    "transfers_seconds": (
        "Seconds from the first byte to the last, summed over successful transfers.",
        lambda s: s.seconds,
    ),
    "transfers_evictions": (
        "Sequences returned to the API server, to be prefilled again.",
        lambda s: s.returns,
    ),
}
#: Histograms of all engine processes: name -> (help, bounds, value).
_STAGES: dict[str, tuple[str, tuple[float, ...], Callable[[EngineStats], Measures]]] = {
    "request_queue_time_seconds": (
        "Seconds from the arrival of a sequence at the engine until the sequence got a slot.",
        SECONDS,
        lambda s: s.queue_times,
    ),
    "request_prefill_time_seconds": (
        "Seconds from the slot to the first token of a sequence.",
        SECONDS,
        lambda s: s.prefill_times,
    ),
    "iteration_tokens_total": ("Tokens of a forward pass with rows.", STEP_TOKENS, lambda s: s.step_tokens),
}
#: Histograms of engine processes with a role: name -> (help, bounds, value).
_TRANSFER_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], Callable[[TransferStats], Measures]]] = {
    "transfer_seconds": (
        "Seconds from the first byte of a KV cache transfer to the last.",
        SECONDS,
        lambda s: s.took,
    ),
    "transfer_exposed_seconds": (
        "Seconds at the sender from the first token until the receiver had the whole KV cache.",
        SECONDS,
        lambda s: s.exposed,
    ),
    "transfer_size_bytes": ("Bytes of a KV cache transfer.", BYTES, lambda s: s.sizes),
}

#: Engine processes with transfers of image embeddings: gauges, counters and histograms.
_EMBEDDING_GAUGES: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "embedding_transfers_awaiting": (
        "Sequences that wait for image embeddings of another group.",
        lambda s: s.blocked,
    ),
    "embedding_transfers_open": ("Open transfers of image embeddings.", lambda s: s.open),
}
_EMBEDDINGS: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "embedding_transfers_done": ("Transfers of image embeddings that succeeded.", lambda s: s.done),
    "embedding_transfers_failed": ("Transfers of image embeddings that failed.", lambda s: s.failed),
    "embedding_transfers_corrupt": (
        "Transfers of image embeddings that failed because of a wrong digest.",
        lambda s: s.corrupt,
    ),
    "embedding_transfers_sent_bytes": ("Bytes of image embeddings sent.", lambda s: s.sent_bytes),
    "embedding_transfers_received_bytes": ("Bytes of image embeddings received.", lambda s: s.received_bytes),
    "embedding_transfers_evictions": (
        "Sequences returned to the API server, because their images must be encoded again.",
        lambda s: s.returns,
    ),
}
_EMBEDDING_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], Callable[[TransferStats], Measures]]] = {
    "embedding_transfer_seconds": (
        "Seconds from the first byte of an image embedding transfer to the last.",
        SECONDS,
        lambda s: s.took,
    ),
    "embedding_transfer_size_bytes": ("Bytes of an image embedding transfer.", BYTES, lambda s: s.sizes),
}

_UP = "1 while the engine process is alive, else 0."
_ENGINE = ("head", "role")
_Values: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
_Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily

#: Of the links to all engine processes. Counters unless in _LINK_GAUGES.
_LINK: dict[str, tuple[str, Callable[[Links], float]]] = {
    "front_bad_frames": ("Invalid frames from engines, dropped by the API server.", lambda c: c.bad_frames),
    "front_late_events": (
        "Token events that arrived after the end of their sequence.",
        lambda c: c.fleet.late_events,
    ),
    "engine_restarts": ("Restarts of engine processes after a failure.", lambda c: c.restarts),
    "streams_paused": (
        "Pauses of a stream: its sequences lost their slots because the client did not read.",
        lambda c: c.pauses,
    ),
    "front_failovers": (
        "Sequences that continued on another engine after the loss of their engine.",
        lambda c: c.failovers,
    ),
    "front_pairs": ("Sequences sent to a pair of a prefill engine and a decode engine.", lambda c: c.paired),
    "front_local_prefills": (
        "Sequences prefilled by a decode engine, because no prefill engine was up.",
        lambda c: c.local_prefills,
    ),
}
_ENCODES = "Images sent to encode engines, by the attempt of the sequence: first or again."
_DECISIONS = (
    "Routing decisions between several engines, by how many of the engines had reported their prefix cache: "
    "all (exact), some (degraded) or none (fallback)."
)
_LINK_GAUGES: dict[str, tuple[str, Callable[[Links], float]]] = {
    "weights_version": (
        "Number of changes of the weights since the start, as new requests use them.",
        lambda c: c.fleet.router.weights,
    ),
    "sleep_level": (
        "Level of the sleep: 1 without KV caches, 2 also without weights, 0 for a server that is awake.",
        lambda c: c.asleep,
    ),
    "front_sequences": ("Open sequences of the API server.", lambda c: c.open_sequences),
    "engines_without_partner": (
        "Live engines with a role (prefill, decode, encode) that have no live partner.",
        lambda c: c.fleet.table.unpaired,
    ),
}


class _LinkCollector(Collector):
    """Collector of an API server's link metrics."""

    def __init__(self, links: Any, model: str) -> None:
        """``links``: Links, or for the metrics of engines anything with ``instances``."""
        self._links = links
        self._model = model

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the links to all engine processes."""
        for name, (text, of_link) in _LINK_GAUGES.items():
            yield self._gauge(name, text, [((), of_link(self._links))])
        for name, (text, of_link) in _LINK.items():
            yield self._counter(name, text, [((), of_link(self._links))])
        encodes = [((attempt,), float(n)) for attempt, n in self._links.fleet.encodes.items()]
        yield self._counter("front_image_encodes", _ENCODES, encodes, "attempt")
        decisions = [((knew,), float(n)) for knew, n in self._links.fleet.router.decisions.items()]
        yield self._counter("routing_decisions", _DECISIONS, decisions, "knew")

    def _gauge(self, name: str, text: str, values: _Values, *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(f"weft:{name}", text, labels=["model_name", *labels]), values)

    def _counter(self, name: str, text: str, values: _Values, *labels: str) -> Metric:
        return self._fill(CounterMetricFamily(f"weft:{name}", text, labels=["model_name", *labels]), values)

    def _fill(self, family: _Family, values: _Values) -> Metric:
        for labels, value in values:
            family.add_metric([self._model, *labels], value)
        return family


class _EngineCollector(_LinkCollector):
    """Collector of each engine process's metrics, as of the last heartbeat."""

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of each engine process."""
        instances = self._links.instances
        stats = [(instance.name, instance.stats) for instance in instances]
        roles = [(one.name, one.role or "") for one in instances]
        alive = [float(one.alive) for one in instances]
        # `roles` has the label values (name, role) of each engine process, in the order of `stats`.
        yield self._gauge("engine_up", _UP, zip(roles, alive, strict=True), *_ENGINE)
        for name, (text, read) in _GAUGES.items():
            yield self._gauge(name, text, zip(roles, [read(its) for _, its in stats], strict=True), *_ENGINE)
        moving = [(who, its.transfers) for who, (_, its) in zip(roles, stats, strict=True)]
        yield from self._transfers(moving, _TRANSFER_GAUGES, _TRANSFERS, _TRANSFER_HISTOGRAMS)
        moving = [(who, its.embedding_transfers) for who, (_, its) in zip(roles, stats, strict=True)]
        yield from self._transfers(moving, _EMBEDDING_GAUGES, _EMBEDDINGS, _EMBEDDING_HISTOGRAMS)
        for name, text, rows in sent_by_transport(roles, stats):
            yield self._counter(name, text, rows, *_ENGINE, "transport")
        for one in tier_families(roles, stats):
            add = self._gauge if one.gauge else self._counter
            yield add(one.name, one.text, one.rows, *one.labels)
        for name, (text, bounds, of_engine) in _STAGES.items():
            measured = [(who, of_engine(its)) for who, (_, its) in zip(roles, stats, strict=True)]
            yield self._histogram(name, text, bounds, measured)
        free = [((engine, str(k)), float(n)) for engine, its in stats for k, n in enumerate(its.free_blocks)]
        yield self._gauge("free_blocks", "Free KV cache blocks, by KV cache group.", free, "head", "kind")
        yield self._gauge(*overlap_metrics.GAUGE, overlap_rows(stats), *overlap_metrics.LABELS)
        for name, (text, by_place) in _PLACES.items():
            places = [((h, str(p)), float(n)) for h, its in stats for p, n in enumerate(by_place(its))]
            yield self._counter(name, text, places, "head", "position")
        for name, (text, read) in _COUNTERS.items():
            yield self._counter(name, text, [((engine,), read(its)) for engine, its in stats], "head")

    def _transfers(
        self,
        all_engines: Iterable[tuple[tuple[str, str], TransferStats | None]],
        gauges: Mapping[str, tuple[str, Callable[[TransferStats], float]]],
        counters: Mapping[str, tuple[str, Callable[[TransferStats], float]]],
        histograms: Mapping[str, tuple[str, tuple[float, ...], Callable[[TransferStats], Measures]]],
    ) -> Iterable[Metric]:
        """Yield the transfer metrics. ``all_engines``: ((name, role), counters or None)."""
        moving = [(who, its) for who, its in all_engines if its is not None]
        for name, (text, read) in gauges.items():
            yield self._gauge(name, text, [(who, read(its)) for who, its in moving], *_ENGINE)
        for name, (text, read) in counters.items():
            yield self._counter(name, text, [(who, read(its)) for who, its in moving], *_ENGINE)
        for name, (text, bounds, of_histogram) in histograms.items():
            yield self._histogram(name, text, bounds, [(who, of_histogram(its)) for who, its in moving])

    def _histogram(
        self,
        name: str,
        text: str,
        bounds: tuple[float, ...],
        values: Iterable[tuple[tuple[str, str], Measures]],
    ) -> Metric:
        family = HistogramMetricFamily(f"weft:{name}", text, labels=["model_name", *_ENGINE])
        for who, measured in values:
            family.add_metric([self._model, *who], measured.cumulative(bounds), measured.total)
        return family


class TokenTimes(Collector):
    """Histogram of the time between tokens. A number is added per token, so the histogram takes no lock: only
    the event loop adds and reads."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model: str) -> None:
        self._name, self._text, self._model = f"weft:{name}", text, model
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Add ``count`` times ``seconds``."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def cumulative(self) -> list[float]:
        """Return the number of times up to each bound, and the number of all times."""
        return list(itertools.accumulate(map(float, self._counts)))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        family.add_metric([self._model], list(zip(bounds, self.cumulative(), strict=True)), self._sum)
        yield family


class Metrics:
    """All metrics of one API server, in private registries. ``links`` are read at each scrape."""

    def __init__(self, model: str, links: Links, spans: SpanWriter | None = None) -> None:
        """Register all metrics, without observations. ``model``: value of the label ``model_name``.
        ``spans``: writer of the API server's spans."""
        self.engines = CollectorRegistry(auto_describe=False)
        self.registry = self._own = CollectorRegistry(auto_describe=False)
        self.model = model
        self.engines.register(_EngineCollector(links, model))
        self._own.register(_LinkCollector(links, model))
        tables = list(HISTOGRAMS)
        self.inter_token = TokenTimes(*tables.pop(1), model)
        self._own.register(self.inter_token)
        made = [
            Histogram(f"weft:{name}", text, ["model_name"], buckets=buckets, registry=self._own)
            for name, text, buckets in tables
        ]
        self.time_to_first_token, self.e2e, *rest = (one.labels(model) for one in made)
        self.prompt_tokens, self.generation_tokens, self.longest_choice, *rest = rest
        self.decode, self.time_per_token, self.asked_n, self.asked_tokens, self.computed_tokens = rest
        self.success, self.failure, self.http, self.misses = (
            Counter(f"weft:{name}", text, labels, registry=self._own) for name, text, labels in EVENTS
        )
        name, text, labels, buckets = HTTP_SECONDS
        self.http_seconds = Histogram(f"weft:{name}", text, labels, buckets=buckets, registry=self._own)
        self._own.register(front_tables.ProcessMetrics(model, spans))

    def latencies(self) -> tuple[list[float], list[float]]:
        """Return the cumulative bucket counts of time to first token and of time between tokens, of the
        requests of this API server. ``front_tables.LATENCY_BOUNDS`` has the bounds."""
        return _bucket_counts(self.time_to_first_token), self.inter_token.cumulative()

    def render(self) -> bytes:
        """Return the exposition of a server with one API server process."""
        return generate_latest(self.engines) + self.own()

    def own(self) -> bytes:
        """Return the metrics counted by this API server, without the engine metrics, which every API server
        sees."""
        return generate_latest(self._own)

    def render_all(self, pages: Mapping[str, bytes]) -> bytes:
        """Return the exposition of a server with several API servers. ``pages``: name -> ``own`` of each.
        Engine metrics are added once, from this API server.

        Samples get the label ``front`` and are not added up. A restarted API server counts from 0;
        Prometheus expects restarts of a series, but not of a sum.
        """
        return generate_latest(self.engines) + labelled(pages)


def labelled(pages: Mapping[str, bytes]) -> bytes:
    """Return the samples of several API servers with the label ``front``. ``pages``: name -> page."""
    merged: dict[str, Metric] = {}
    for front, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={**sample.labels, "front": front}))
    return generate_latest(_Families(merged.values()))


def engine_page(engines: Any, model: str) -> bytes:
    """Return the metrics of some engines as text. ``engines.instances``: name, role, alive and stats of
    each."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engines, model))
    return generate_latest(registry)


def _bucket_counts(histogram: Histogram) -> list[float]:
    samples = (sample for family in histogram.collect() for sample in family.samples)
    return [sample.value for sample in samples if sample.name.endswith("_bucket")]


class _Families(CollectorRegistry):
    """Registry of collected metrics."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def describe() -> str:
    """Return one line per metric: name, type, labels, buckets. The content of ``docs/metrics.txt``."""
    # Engine metrics carry the labels of the engine process; the API server's own metrics do not.
    of_engines = (_STAGES, _TRANSFER_HISTOGRAMS, _EMBEDDING_HISTOGRAMS)
    engine_bounds = {name: bounds for one in of_engines for name, (_, bounds, _) in one.items()}
    gauges = (*_GAUGES, *_TRANSFER_GAUGES, *_EMBEDDING_GAUGES, "engine_up")
    lines = [f"weft:{name} gauge model_name,{','.join(_ENGINE)}" for name in gauges]
    lines += [f"weft:{one}_total counter model_name,{','.join(_ENGINE)}" for one in _TRANSFERS | _EMBEDDINGS]
    lines += [f"weft:{name}_total counter model_name,{','.join(_ENGINE)},transport" for name, _ in SENT]
    lines += [
        f"weft:{name} histogram model_name,{','.join(_ENGINE)} {','.join(f'{bound:g}' for bound in bounds)}"
        for name, bounds in engine_bounds.items()
    ]
    lines += [f"weft:{name} gauge model_name" for name in _LINK_GAUGES]
    lines += [f"weft:{name}_total counter model_name,head" for name in _COUNTERS]
    lines += [f"weft:{name}_total counter model_name" for name in _LINK]
    lines += front_tables.describe() + tier_metrics.describe()
    lines.append("weft:front_image_encodes_total counter model_name,attempt")
    lines.append("weft:routing_decisions_total counter model_name,knew")
    lines.append("weft:free_blocks gauge model_name,head,kind")
    lines.append(f"weft:{overlap_metrics.GAUGE[0]} gauge model_name,{','.join(overlap_metrics.LABELS)}")
    lines += [f"weft:{name}_total counter model_name,head,position" for name in _PLACES]
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(describe())
