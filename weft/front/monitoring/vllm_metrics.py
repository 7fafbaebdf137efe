"""Metrics under vLLM's names, for dashboards and gateways made for vLLM (``--vllm-metrics``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.common import errors
from weft.config.resolved import EngineConfig
from weft.control.fleet.instances import Instance
from weft.front.monitoring.adapter_metrics import requests_info

_OLDER = {
    b"vllm:inter_token_latency_seconds": b"vllm:time_per_output_token_seconds",
    b"vllm:kv_cache_usage_perc": b"vllm:gpu_cache_usage_perc",
}
"""Present name -> old name. Dashboards for earlier vLLM versions use the old names."""
_HTTP = re.compile(
    rb'^vllm:http_requests_total\{(?P<more>front="[^"]*",)?method="(?P<method>[A-Z]+|other)",'
    rb'route="(?P<route>[^"]*)",status="(?P<status>\d)\d*"\} (?P<count>\S+)$',
    re.MULTILINE,
)
_HTTP_SECONDS = re.compile(rb"vllm:(http_request_duration_seconds.*)")
_PROCESS = re.compile(rb"^(# \w+ )?process_.*\n", re.MULTILINE)
"""Metrics of the process, which have the same names in both forms of the page."""
_NO_ENGINE = re.compile(rb'^(vllm:\w+\{)(?=[^}\n]*model_name=")(?![^}\n]*engine=")', re.MULTILINE)
_FAILED = re.compile(
    rb'^vllm:request_failure_total\{code="(?P<code>[^"]*)".*\} (?P<count>\S+)$', re.MULTILINE
)
_SUCCESS_TYPE = b"# TYPE vllm:request_success_total counter\n"
_SERVER_ERRORS = frozenset(
    kind.code.encode() for kind in vars(errors).values() if getattr(kind, "http_status", 0) in range(500, 600)
)
"""Codes of failures of the server. vLLM counts such failures as the finish reason "error"."""
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's names for the levels 0, 1 and 2 of a sleep."""


def as_vllm(page: bytes, config: EngineConfig, engines: Iterable[Instance], asleep: int = 0) -> bytes:
    """Return the exposition ``page`` with vLLM's names, the label ``engine`` in place of ``head``, and
    metrics that vLLM derives in another way. ``engines``: with the counters of the last heartbeat.
    ``asleep``: level of the sleep."""
    engines = list(engines)
    renamed = _vllm_lines(page, config.served_names[0], engines[0].name if engines else "0")
    older = [
        line.replace(name, before)
        for line in renamed.split(b"\n")
        for name, before in _OLDER.items()
        if name in line
    ]
    derived = CollectorRegistry(auto_describe=False)
    derived.register(_Derived(config, engines, _answers(renamed), page, asleep))
    return renamed + b"\n".join([*older, b""]) + generate_latest(derived)


def _vllm_lines(page: bytes, model: str, engine: str) -> bytes:
    """Return the lines of ``page`` that vLLM has too, with vLLM's names and labels.

    vLLM's dashboards select series by ``engine``. Series of the API server get the label of ``engine``, the
    first engine.
    """
    renamed = _PROCESS.sub(b"", page).replace(b"weft:", b"vllm:").replace(b'head="', b'engine="')
    renamed = _HTTP_SECONDS.sub(lambda line: line[1].replace(b'route="', b'handler="'), renamed)
    failed = sum(float(one["count"]) for one in _FAILED.finditer(renamed) if one["code"] in _SERVER_ERRORS)
    quoted = model.replace("\\", r"\\").replace('"', r"\"").encode()
    error = b'vllm:request_success_total{finished_reason="error",model_name="%b"} %.1f\n' % (quoted, failed)
    renamed = renamed.replace(_SUCCESS_TYPE, _SUCCESS_TYPE + error)
    return _NO_ENGINE.sub(rb'\1engine="%b",' % engine.encode(), renamed)


def _answers(page: bytes) -> Counter[tuple[str, str, str]]:
    """Return (route, method, first digit of the status) -> number of answers."""
    found: Counter[tuple[str, str, str]] = Counter()
    for one in _HTTP.finditer(page):
        key = one["route"].decode(), one["method"].decode(), one["status"].decode()
        found[key] += int(float(one["count"]))
    return found


class _Derived(Collector):
    """Metrics derived from other metrics."""

    def __init__(
        self,
        config: EngineConfig,
        engines: list[Instance],
        answers: Counter[tuple[str, str, str]],
        page: bytes,
        asleep: int,
    ) -> None:
        self._config, self._asleep = config, asleep
        self._engines = engines
        self._answers = answers
        self._page = page

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that vLLM has and Weft does not: cached prompt tokens, drafts, cache settings,
        and answers by status class."""
        labels = ["model_name", "engine"]
        model = self._config.served_names[0]
        cached = CounterMetricFamily(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", labels=labels
        )
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens, by source: computed, or found in the prefix cache.",
            labels=[*labels, "source"],
        )
        drafts = CounterMetricFamily(
            "vllm:spec_decode_num_drafts", "Drafts verified: one per sequence and step.", labels=labels
        )
        for engine in self._engines:
            name, stats = engine.name, engine.stats
            hits = min(stats.prefix_hits, stats.prompt_tokens)
            cached.add_metric([model, name], hits)
            for source, count in (("local_compute", stats.prompt_tokens - hits), ("local_cache_hit", hits)):
                sources.add_metric([model, name, source], count)
            drafts.add_metric([model, name], stats.drafts[0] if stats.drafts else 0)
        yield from (cached, sources, drafts, self._cache_config(model))
        yield from self._states(model)
        if places := self._config.lora.max_loras:
            yield requests_info(self._page, places)
        http = CounterMetricFamily(
            "http_requests", "HTTP requests answered.", labels=["handler", "method", "status"]
        )
        for (route, method, status), count in self._answers.items():
            http.add_metric([route, method, f"{status}xx"], count)
        yield http

    def _states(self, model: str) -> Iterable[Metric]:
        """Yield waiting sequences by reason, cached tokens by tier, uses of the image cache, and sleep
        states."""
        labels = ["model_name", "engine"]
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences without a slot: deferred while caches or images arrive, else for lack of capacity.",
            labels=[*labels, "reason"],
        )
        tiers = CounterMetricFamily(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens found in the prefix cache, by tier.",
            labels=[*labels, "source"],
        )
        queries = CounterMetricFamily(
            "vllm:mm_cache_queries", "Images looked up in the embedding cache.", labels=labels
        )
        hits = CounterMetricFamily(
            "vllm:mm_cache_hits", "Images found in the embedding cache.", labels=labels
        )
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "Sleep state of an engine.", labels=[*labels, "sleep_state"]
        )
        for engine in self._engines:
            name, stats = engine.name, engine.stats
            moving = [one for one in (stats.transfers, stats.embedding_transfers) if one is not None]
            deferred = min(sum(one.blocked + one.fetching for one in moving), stats.waiting)
            waiting.add_metric([model, name, "capacity"], stats.waiting - deferred)
            waiting.add_metric([model, name, "deferred"], deferred)
            tiers.add_metric([model, name, "device"], min(stats.prefix_hits, stats.prompt_tokens))
            queries.add_metric([model, name], stats.images_encoded + stats.image_hits)
            hits.add_metric([model, name], stats.image_hits)
            for level, state in enumerate(_SLEEP_STATES):
                sleep.add_metric([model, name, state], level == self._asleep)
        yield from (waiting, tiers, queries, hits, sleep)

    def _cache_config(self, model: str) -> Metric:
        """Return the KV cache's settings as labels of a gauge with value 1, for each engine that answers.

        Gateways multiply ``block_size`` by ``num_gpu_blocks``. A GPU engine knows the blocks only after the
        load, so both numbers come from the engine.
        """
        kv, cache = self._config.kv, self._config.cache
        names = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's settings.",
            labels=["model_name", "engine", *names, "num_gpu_blocks"],
        )
        for engine in self._engines:
            if (welcome := engine.welcome) is None:
                continue
            facts = (
                welcome.block_size,
                cache.kv_cache_dtype,
                kv.enable_prefix_caching,
                cache.gpu_memory_utilization,
                max(welcome.num_blocks, default=0),
            )
            family.add_metric([model, engine.name, *map(str, facts)], 1)
        return family
