"""Write the Grafana dashboard of Weft's metrics.

    python deploy/monitoring/dashboard.py > deploy/monitoring/weft.json

Edit the panels below, not the JSON file. ``tests/deploy/test_monitoring.py`` compares both, and checks every
metric and label against docs/metrics.txt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TARGET = 'job=~"$job", instance=~"$instance"'
"""Labels of all series."""
MODEL = f'{TARGET}, model_name=~"$model_name"'
"""Labels of series with a model."""
ROLE = f'{MODEL}, role=~"$role"'
"""Labels of series of an engine with a role."""
WINDOW = "$__rate_interval"
PERCENTILES = (0.5, 0.95, 0.99)

Query = tuple[str, str]
"""PromQL and the legend."""


def rate(metric: str, by: str = "", where: str = MODEL) -> str:
    """Return the rate per second of a counter, summed over all labels except ``by``."""
    return f"sum{_by(by)}(rate(weft:{metric}{{{where}}}[{WINDOW}]))"


def of_roles(metric: str) -> str:
    """Return the rate of an engine's counter by role. The role comes from ``engine_up``."""
    roles = f"group by (instance, head, role) (weft:engine_up{{{ROLE}}})"
    each = rate(metric, "instance, head")
    return f"sum by (role) ({each} * on (instance, head) group_left (role) {roles})"


def now(metric: str, by: str = "", how: str = "sum", where: str = ROLE) -> str:
    """Return a gauge, reduced by ``how`` over all labels except ``by``."""
    return f"{how}{_by(by)}(weft:{metric}{{{where}}})"


def quantile(part: float, metric: str, by: str = "", where: str = MODEL) -> str:
    """Return a quantile of a histogram, by the labels ``by``."""
    buckets = rate(f"{metric}_bucket", f"le, {by}" if by else "le", where)
    return f"histogram_quantile({part:g}, {buckets})"


def quantiles(metric: str, where: str = MODEL) -> list[Query]:
    """Return the queries of the usual percentiles of a histogram."""
    return [(quantile(part, metric, where=where), f"p{round(part * 100)}") for part in PERCENTILES]


def share(part: str, whole: str) -> str:
    """Return ``part`` divided by ``whole``; no value without a whole."""
    return f"{part} / ({whole} > 0)"


def mean(metric: str, by: str, where: str = MODEL) -> str:
    """Return the mean of a histogram, by the labels ``by``."""
    return share(rate(f"{metric}_sum", by, where), rate(f"{metric}_count", by, where))


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else " "


ENGINES_UP = f"sum(weft:engine_up{{{ROLE}}}) / count(weft:engine_up{{{ROLE}}})"
FINISHED, FAILED = rate("request_success_total"), rate("request_failure_total")
HITS = share(rate("prefix_cache_hits_total"), rate("prefix_cache_queries_total"))
PROCESS = f"process_open_fds{{{TARGET}}} / process_max_fds{{{TARGET}}}"

STATS: list[tuple[str, str, str]] = [
    ("Engines up", ENGINES_UP, "percentunit"),
    ("Answers per second", FINISHED, "reqps"),
    ("Output tokens per second", rate("generation_tokens_total"), "short"),
    ("Failed requests per second", FAILED, "reqps"),
    ("Time to first token, p95", quantile(0.95, "time_to_first_token_seconds"), "s"),
    ("Time per output token, p95", quantile(0.95, "request_time_per_output_token_seconds"), "s"),
    ("Waiting sequences", now("num_requests_waiting"), "short"),
    ("KV cache use, fullest engine", now("kv_cache_usage_perc", how="max"), "percentunit"),
]
"""Title, query and unit of the numbers at the top."""

ROWS: dict[str, list[tuple[str, str, list[Query]]]] = {
    "Latency": [
        ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        ("Time per output token", "s", quantiles("request_time_per_output_token_seconds")),
        ("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
        ("Whole request", "s", quantiles("e2e_request_latency_seconds")),
        (
            "Queue time by role, p95",
            "s",
            [(quantile(0.95, "request_queue_time_seconds", "role", ROLE), "{{role}}")],
        ),
        (
            "Prefill time by role, p95",
            "s",
            [(quantile(0.95, "request_prefill_time_seconds", "role", ROLE), "{{role}}")],
        ),
    ],
    "Throughput": [
        ("Prompt tokens per second by role", "short", [(of_roles("prompt_tokens_total"), "{{role}}")]),
        ("Output tokens per second by role", "short", [(of_roles("generation_tokens_total"), "{{role}}")]),
        (
            "Ends of choices",
            "reqps",
            [(rate("request_success_total", "finished_reason"), "{{finished_reason}}")],
        ),
        ("Steps per second by role", "short", [(of_roles("engine_steps_total"), "{{role}}")]),
        (
            "Mean tokens of a step by role",
            "short",
            [(mean("iteration_tokens_total", "role", ROLE), "{{role}}")],
        ),
        (
            "Accepted drafts",
            "percentunit",
            [
                (
                    share(
                        rate("spec_decode_num_accepted_tokens_total"),
                        rate("spec_decode_num_draft_tokens_total"),
                    ),
                    "accepted",
                )
            ],
        ),
    ],
    "Queue and cache": [
        ("Running sequences by role", "short", [(now("num_requests_running", "role"), "{{role}}")]),
        ("Waiting sequences by role", "short", [(now("num_requests_waiting", "role"), "{{role}}")]),
        ("Free slots by role", "short", [(now("free_slots", "role"), "{{role}}")]),
        (
            "KV cache use",
            "percentunit",
            [(now("kv_cache_usage_perc", "head, role", "max"), "{{head}} {{role}}")],
        ),
        (
            "Preemptions per second",
            "short",
            [
                (of_roles("num_preemptions_total"), "{{role}}"),
                (rate("num_requeued_total"), "requeued by a recovery"),
            ],
        ),
        ("Hits of the prefix cache", "percentunit", [(HITS, "tokens found")]),
        ("Ends of cached prefixes", "short", [(rate("prefix_cache_misses_total", "reason"), "{{reason}}")]),
        (
            "Images",
            "short",
            [
                (rate("images_encoded_total"), "encoded"),
                (rate("image_cache_hits_total"), "found in the cache"),
            ],
        ),
    ],
    "Transfers": [
        ("Transfer after the first token", "s", quantiles("transfer_exposed_seconds", ROLE)),
        ("Whole transfer", "s", quantiles("transfer_seconds", ROLE)),
        (
            "Bytes per second",
            "Bps",
            [
                (rate("transfers_sent_bytes_total", "head", ROLE), "{{head}} sent"),
                (rate("embedding_transfers_sent_bytes_total", "head", ROLE), "{{head}} sent, images"),
            ],
        ),
        (
            "Transfers now",
            "short",
            [
                (now("transfers_open", "role"), "open, {{role}}"),
                (now("transfers_awaiting", "role"), "waiting for a prompt, {{role}}"),
                (now("transfers_fetching", "role"), "receiving, {{role}}"),
                (now("transfers_blocks_on_hold", "role"), "pinned blocks, {{role}}"),
            ],
        ),
        (
            "Failed transfers per second",
            "short",
            [
                (rate("transfers_failed_total", "role", ROLE), "failed, {{role}}"),
                (rate("transfers_corrupt_total", "role", ROLE), "wrong digest, {{role}}"),
                (rate("transfers_evictions_total", "role", ROLE), "prefilled again, {{role}}"),
                (rate("embedding_transfers_failed_total", "role", ROLE), "images, {{role}}"),
            ],
        ),
    ],
    "Failures": [
        ("Failed requests by code", "reqps", [(rate("request_failure_total", "code"), "{{code}}")]),
        (
            "Restarts and recoveries",
            "short",
            [
                (rate("engine_restarts_total"), "restarts of engines"),
                (rate("group_recoveries_total"), "recoveries of groups"),
                (rate("front_failovers_total"), "sequences continued elsewhere"),
            ],
        ),
        (
            "Errors in engines",
            "short",
            [
                (rate("row_errors_total"), "NaN or infinite logits"),
                (rate("grammar_errors_total"), "grammars"),
                (rate("head_bad_frames_total"), "invalid messages, engine"),
                (rate("front_bad_frames_total"), "invalid messages, API server"),
            ],
        ),
        (
            "Dropped spans per second",
            "short",
            [
                (rate("front_spans_dropped_total"), "API servers"),
                (rate("engine_spans_dropped_total"), "engines"),
            ],
        ),
    ],
    "Fleet": [
        ("Engines up by role", "short", [(now("engine_up", "role"), "{{role}}")]),
        ("Engines that are down", "short", [(f"weft:engine_up{{{ROLE}}} == 0", "{{head}} {{role}}")]),
        (
            "Engines without a partner",
            "short",
            [(now("engines_without_partner", how="max", where=MODEL), "engines")],
        ),
        (
            "Placements per second",
            "short",
            [
                (rate("front_pairs_total"), "pairs of prefill and decode"),
                (rate("front_local_prefills_total"), "prefilled by the decode engine"),
                (rate("front_image_encodes_total", "attempt"), "images to encode engines, {{attempt}}"),
            ],
        ),
        (
            "Routing decisions",
            "short",
            [(rate("routing_decisions_total", "knew"), "cache known of {{knew}}")],
        ),
        ("Paused streams per second", "short", [(rate("streams_paused_total"), "clients that do not read")]),
    ],
    "API server": [
        ("HTTP answers", "reqps", [(rate("http_requests_total", "status", TARGET), "{{status}}")]),
        (
            "Mean time of a route",
            "s",
            [(mean("http_request_duration_seconds", "route", TARGET), "{{route}}")],
        ),
        (
            "CPUs",
            "short",
            [(f"rate(process_cpu_seconds_total{{{TARGET}}}[{WINDOW}])", "{{instance}} {{front}}")],
        ),
        ("Memory", "bytes", [(f"process_resident_memory_bytes{{{TARGET}}}", "{{instance}} {{front}}")]),
        ("Used share of open files", "percentunit", [(PROCESS, "{{instance}} {{front}}")]),
    ],
}
"""Row -> panels: title, unit, queries."""


def panel(
    kind: str, title: str, unit: str, queries: list[Query], place: tuple[int, int, int, int]
) -> dict[str, Any]:
    """Return a panel. ``place``: x, y, width and height on Grafana's grid of 24 columns."""
    x, y, w, h = place
    targets = [
        {"refId": chr(ord("A") + number), "expr": expr, "legendFormat": legend}
        for number, (expr, legend) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": w, "h": h},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def panels() -> list[dict[str, Any]]:
    """Return all panels: two lines of numbers, then three panels per line in each row."""
    made = [
        panel("stat", title, unit, [(expr, "")], (number % 4 * 6, number // 4 * 4, 6, 4))
        for number, (title, expr, unit) in enumerate(STATS)
    ]
    y = len(STATS) // 4 * 4
    for row, inside in ROWS.items():
        made.append({"type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []})
        y += 1
        for number, (title, unit, queries) in enumerate(inside):
            place = (number % 3 * 8, y + number // 3 * 8, 8, 8)
            made.append(panel("timeseries", title, unit, queries, place))
        y += -(-len(inside) // 3) * 8
    for number, one in enumerate(made):
        one["id"] = number + 1
    return made


def variable(name: str, where: str) -> dict[str, Any]:
    """Return a variable with the values of a label. ``where``: label matchers of the query."""
    query = f"label_values(weft:engine_up{{{where}}}, {name})"
    return {
        "name": name,
        "label": name.replace("_", " "),
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's format."""
    source = {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}
    variables = [
        source,
        variable("job", ""),
        variable("instance", 'job=~"$job"'),
        variable("model_name", TARGET),
        variable("role", MODEL),
    ]
    return {
        "uid": "weft",
        "title": "Weft",
        "tags": ["weft"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels(),
    }


def text() -> str:
    """Return the content of weft.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
