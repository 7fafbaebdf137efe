"""Compute medians, spread and ratios, and render the page. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.rounds import value_of
from weft.bench.workloads import WORKLOADS

#: Column titles of the in-process workloads, and True if more is better.
TITLES = {
    "W1": ("output tok/s", True),
    "W2": ("ms/token", False),
    "W3": ("prefill tok/s", True),
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Hold the median and the range of samples."""

    median: float
    low: float
    high: float
    count: int

    def text(self) -> str:
        """Text such as ``634 (620 to 641)``, with as many digits as the size needs."""
        if self.count == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


def number(value: float) -> str:
    """Return three significant digits for small values, whole numbers for large values."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread(samples: Sequence[float]) -> Spread | None:
    """Return the spread of ``samples``, or None without samples."""
    if not samples:
        return None
    return Spread(statistics.median(samples), min(samples), max(samples), len(samples))


def ratios(own: Sequence[float], peer: Sequence[float], more_is_better: bool) -> Spread | None:
    """Return the factor by which ``own`` is better, round by round, because a slow round is slow for both.

    Values above 1 mean better than the peer, for both directions of the measure.
    """
    pairs = zip(own, peer, strict=False)
    return spread([a / b if more_is_better else b / a for a, b in pairs if a > 0 and b > 0])


def samples(result: Mapping[str, Any], engine: str, workload: str) -> list[float]:
    """Return the measure of each round, in the unit of the workload."""
    record = result["engines"].get(engine, {})
    if workload == "W4":
        served = record.get("server", {}).get("samples", [])
        return [one["output_token_throughput"] for one in served]
    return [value_of(WORKLOADS[workload], seconds) for seconds in record.get("samples", {}).get(workload, [])]


def latency(result: Mapping[str, Any], engine: str, metric: str, share: str) -> list[float]:
    """Return a latency of W4 in milliseconds, one value per round."""
    served = result["engines"].get(engine, {}).get("server", {}).get("samples", [])
    return [one["latency_ms"][metric][share] for one in served if one["latency_ms"].get(metric)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _cell(found: Spread | None) -> str:
    return "-" if found is None else found.text()


def _gigabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e9:.2f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else number(value)


def offline_table(result: Mapping[str, Any]) -> list[str]:
    """Return the table of W1 to W3, one row per engine."""
    workloads = [name for name in result["workloads"] if name in TITLES]
    head = ["engine", *(f"{name} {TITLES[name][0]}" for name in workloads), "peak memory GB", "load s"]
    rows = []
    for engine, record in result["engines"].items():
        cells = [_cell(spread(samples(result, engine, name))) for name in workloads]
        rows.append([engine, *cells, _gigabytes(record.get("peak_rss")), _seconds(record.get("load_s"))])
    return _table(head, rows)


def served_table(result: Mapping[str, Any]) -> list[str]:
    """Return the table of W4: throughput, latencies, start-up and memory of the servers."""
    head = ["server", "W4 output tok/s", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms"]
    rows = []
    for engine, record in result["engines"].items():
        server = record.get("server")
        if server is None:
            continue
        cells = [_cell(spread(samples(result, engine, "W4")))]
        for metric in ("ttft", "tpot"):
            cells += [_cell(spread(latency(result, engine, metric, share))) for share in ("p50", "p99")]
        memory, start = server.get("peak_memory"), server.get("start_s")
        rows.append([engine, *cells, _gigabytes(memory), _seconds(start)])
    return _table([*head, "peak memory GB", "start s"], rows)


def ratio_table(result: Mapping[str, Any]) -> list[str]:
    """Return a table of the factors of every Weft row over every peer, by workload."""
    own = [name for name, record in result["engines"].items() if record.get("weft")]
    peers = [name for name in result["engines"] if name not in own]
    rows = []
    for mine in own:
        for peer in [*peers, *(name for name in own if name != mine)]:
            cells = [
                _cell(
                    ratios(
                        samples(result, mine, name),
                        samples(result, peer, name),
                        TITLES.get(name, ("", True))[1],
                    )
                )
                for name in result["workloads"]
            ]
            if any(cell != "-" for cell in cells):
                rows.append([f"{mine} / {peer}", *cells])
    return _table(["how many times better", *result["workloads"]], rows) if rows else []


def same_table(result: Mapping[str, Any]) -> list[str]:
    """Return a table of the requests whose greedy tokens changed."""
    rows = []
    for engine, record in result["engines"].items():
        found = record.get("differing_requests")
        if found:
            cells = [f"{a} of {b}" for a, b in (found["two_runs"], found["batch_against_single"])]
            rows.append([engine, *cells])
    head = ["requests whose tokens differ", "two identical runs", "16 together against one at a time"]
    return _table(head, rows) if rows else []


def page(result: Mapping[str, Any]) -> str:
    """Return the Markdown page of a result."""
    machine = result["machine"]
    cpu = machine["cpu"]
    lines = [
        f"# {result['name']}: {result['model']}, {result['dtype']}, {result['threads']} threads",
        "",
        f"{result['date']}, commit {result['commit'] or 'unknown'}: `{result['command']}`",
        "",
        f"{cpu['model']} (family {cpu['family']}, model {cpu['model_number']}), {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['system']}. "
        f"Has {', '.join(cpu['has']) or 'no flag that matters'}; lacks {', '.join(cpu['lacks']) or 'none'}. "
        f"Load average {machine['load_average'][0]:.1f} before, {result['load_average_after'][0]:.1f} after "
        f"(the engines' own load is in the second).",
        "",
        f"Median (smallest to largest) of {result['rounds']} rounds, {result['order']}."
        + (" **Interrupted: not all rounds ran.**" if result.get("interrupted") else ""),
        "",
    ]
    for name, about in result["workloads"].items():
        lines.append(f"* {name}: {about}")
    for table in (offline_table(result), served_table(result), ratio_table(result), same_table(result)):
        if len(table) > 2:
            lines += ["", *table]
    lines += ["", *_versions(result), *_troubles(result)]
    return "\n".join(lines) + "\n"


def _versions(result: Mapping[str, Any]) -> list[str]:
    found = [
        f"{name} {record['version']}" for name, record in result["engines"].items() if "version" in record
    ]
    lines = [f"Versions: {', '.join(found)}."] if found else []
    flags = {name: record["flags"] for name, record in result["engines"].items() if record.get("flags")}
    return [*lines, *(f"`{name}` is Weft with `{given}`." for name, given in flags.items())]


def _troubles(result: Mapping[str, Any]) -> list[str]:
    lines = [f"* {name} is missing: {why}" for name, why in result["missing"].items()]
    for name, record in result["engines"].items():
        for trouble in (record.get("error"), record.get("server", {}).get("error")):
            if trouble:
                lines.append(f"* {name} failed: {trouble.splitlines()[0]}")
    return ["", *lines] if lines else []
