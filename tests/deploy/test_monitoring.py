"""The Grafana dashboard and the alert rules name metrics and labels that exist, and use each by its type."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

from weft.common import errors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/monitoring"
OPERATE = (ROOT / "docs/guides/operate.md").read_text(encoding="utf-8")
TARGET = {"job", "instance", "front"}
"""Labels of every series: of the target, and of the API server where there are several."""
FUNCTIONS = ("rate", "increase")
OUTSIDE = {"up"}
"""Metrics of Prometheus itself."""
SERIES = re.compile(r"\b((?:weft:|process_)\w+|up\b)(?:\{([^}]*)\})?(\[[\w$]+\])?")
MATCHER = re.compile(r"(\w+)(?:=~|!~|!=|=)")
BY = re.compile(r"\b(?:by|on|group_left|ignoring|without) \(([^)]*)\)")


class Known(NamedTuple):
    kind: str
    labels: set[str]


def known_metrics() -> dict[str, Known]:
    """Return the series of docs/metrics.txt, with the three series of each histogram."""
    found: dict[str, Known] = {}
    for line in (ROOT / "docs/metrics.txt").read_text(encoding="utf-8").splitlines():
        name, kind, labels, *_ = line.split()
        own = TARGET | (set() if labels == "-" else set(labels.split(",")))
        if kind == "histogram":
            found[f"{name}_bucket"] = Known("counter", own | {"le"})
            found |= {f"{name}_{end}": Known("counter", own) for end in ("sum", "count")}
        else:
            found[name] = Known(kind, own)
    return found


KNOWN = known_metrics()


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weft_dashboard", FOLDER / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DASHBOARD = json.loads((FOLDER / "weft.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def dashboard_queries() -> list[tuple[str, str]]:
    return [(f"panel {one['title']}", target["expr"]) for one in panels() for target in one["targets"]]


QUERIES = [*dashboard_queries(), *((f"alert {rule['alert']}", rule["expr"]) for rule in RULES)]


def wrong(query: str) -> str | None:
    """Return the first mistake of a query, or None."""
    allowed = set(TARGET) | {"le"}
    for name, matchers, window in SERIES.findall(query):
        if name in OUTSIDE:
            continue
        if name not in KNOWN:
            return f"{name} does not exist"
        allowed |= KNOWN[name].labels
        unknown = set(MATCHER.findall(matchers)) - KNOWN[name].labels
        if unknown:
            return f"{name} has no label {sorted(unknown)}"
        in_function = re.search(rf"\b(?:{'|'.join(FUNCTIONS)})\({re.escape(name)}\b", query) is not None
        counts = KNOWN[name].kind == "counter"
        if counts != (bool(window) and in_function):
            return f"{name} is a {KNOWN[name].kind}"
    for labels in BY.findall(query):
        strange = set(filter(None, re.split(r"[,\s]+", labels))) - allowed
        if strange:
            return f"no metric of the query has the label {sorted(strange)}"
    if "histogram_quantile" in query and not re.search(r"by \([^)]*\ble\b[^)]*\)", query):
        return "a quantile needs the label le"
    if "_bucket" in query and "histogram_quantile" not in query:
        return "buckets are for quantiles"
    return None


def test_metrics_and_labels_exist() -> None:
    assert len(QUERIES) > 80
    assert all(SERIES.search(query) for _, query in QUERIES)
    assert [(place, mistake) for place, query in QUERIES if (mistake := wrong(query))] == []


@pytest.mark.parametrize(
    ("query", "mistake"),
    [
        ("sum(rate(weft:no_such_total[5m]))", "does not exist"),
        ("sum(rate(weft:time_to_first_token_seconds[5m]))", "does not exist"),
        ("sum(weft:generation_tokens_total)", "is a counter"),
        ("weft:generation_tokens_total[5m]", "is a counter"),
        ("sum(rate(weft:engine_up[5m]))", "is a gauge"),
        ('sum(rate(weft:generation_tokens_total{role="decode"}[5m]))', "has no label"),
        ("sum by (rôle) (weft:engine_up)", "has the label"),
        ("sum by (code) (weft:engine_up)", "has the label"),
        ("histogram_quantile(0.9, sum(rate(weft:transfer_seconds_bucket[5m])))", "needs the label le"),
    ],
)
def test_mistakes_are_found(query: str, mistake: str) -> None:
    assert mistake in (wrong(query) or "")


def test_queries_are_promql() -> None:
    parser = pytest.importorskip("promql_parser", reason="needs promql-parser (weft[dev])")
    with pytest.raises(ValueError, match="parenthesis"):
        parser.parse("sum by (role (weft:engine_up)")
    for _, query in QUERIES:
        parser.parse(re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "5m")))


def test_the_dashboard_is_up_to_date() -> None:
    command = "python deploy/monitoring/dashboard.py > deploy/monitoring/weft.json"
    assert (FOLDER / "weft.json").read_text(encoding="utf-8") == load_generator().text(), f"run: {command}"


def test_panels_have_places_and_variables_exist() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in panels()]
    assert len(titles) == len(set(titles))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    for variable in DASHBOARD["templating"]["list"][1:]:
        label = re.fullmatch(r"label_values\((weft:\w+)\{.*\}, (\w+)\)", variable["query"])
        assert label is not None
        assert label[2] in KNOWN[label[1]].labels
    used = set(re.findall(r"\$(\w+)", json.dumps([query for _, query in dashboard_queries()])))
    assert used - {"__rate_interval"} <= names


def test_the_dashboard_has_the_stages_of_serving() -> None:
    text = json.dumps(DASHBOARD)
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "request_queue_time_seconds",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "transfer_exposed_seconds",
        "num_preemptions_total",
        "request_failure_total",
        "engine_up",
    ):
        assert f"weft:{name}" in text


def test_alerts_are_complete_and_in_the_guide() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (ROOT / page).is_file()
        headings = re.findall(r"^## (.*)$", OPERATE, re.M)
        assert anchor in [re.sub(r"[^a-z ]", "", one.lower()).replace(" ", "-") for one in headings]
        # Labels of the message survive the aggregation.
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
        assert all(used <= set(re.split(r",\s*", labels)) for labels in kept), rule["alert"]
    rows = re.findall(r"^\| `(Weft\w+)` \|", OPERATE, re.M)
    assert sorted(rows) == sorted(names), "each alert has a row in the guide"


def test_codes_of_failures_exist() -> None:
    codes = {kind.code for kind in vars(errors).values() if isinstance(getattr(kind, "code", None), str)}
    named = {
        code
        for rule in RULES
        for group in re.findall(r'code=~?"([^"]*)"', rule["expr"])
        for code in group.split("|")
    }
    assert named
    assert named <= codes | codes_of_server_faults()


@functools.cache
def codes_of_server_faults() -> frozenset[str]:
    """Return the codes of all answers with status 5xx: of the error classes, and of constructors that name a
    code. Left out: codes that some answers have with another status, codes that blame the client, and codes
    of the scripted engine."""
    kinds: dict[str, Any] = {name: kind for name, kind in vars(errors).items() if hasattr(kind, "blame")}
    kinds = {name: kind for name, kind in kinds.items() if isinstance(kind.blame, str)}
    found = [(kind.code, kind) for kind in kinds.values()]
    for file in (ROOT / "weft").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "code=" not in text or "scripted" in file.parts:
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in kinds:
                found += [
                    (key.value.value, kinds[call.func.id])
                    for key in call.keywords
                    if key.arg == "code" and isinstance(key.value, ast.Constant)
                ]
    others = {code for code, kind in found if kind.http_status < 500 or kind.blame == "client"}
    return frozenset(code for code, _ in found) - others


def test_the_alert_of_failures_has_all_codes_of_the_server() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "WeftRequestsFail"]
    (listed,) = re.findall(r'code=~"([^"]*)"', rule["expr"])
    assert set(listed.split("|")) == codes_of_server_faults()
    # A server without any success has no series of successes, so the sum needs a default.
    assert re.search(r"success_total\[5m\]\)\)\s*or sum ", rule["expr"])


def test_dropped_spans_of_engines_count() -> None:
    (rule,) = [rule for rule in RULES if rule["alert"] == "WeftSpansDropped"]
    assert {"weft:front_spans_dropped_total", "weft:engine_spans_dropped_total"} <= {
        name for name, *_ in SERIES.findall(rule["expr"])
    }
