"""Make a report from the records of a run: JSON for programs, a table for people."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from weft.bench.client import failures
from weft.bench.load import LoadRun
from weft.bench.records import RequestRecord
from weft.bench.stats import PERCENTILES, meets, percentile, ratio, rounded, summary

_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
_BUSY = 0.8
"""Share of a CPU above which the load generator may limit the numbers."""


def make_report(
    run: LoadRun, levels: dict[str, float], facts: dict[str, Any], heads: Mapping[str, int] = {}
) -> dict[str, Any]:
    """Return the whole result of a run. ``facts`` (the settings) become ``setup``.

    Latencies are in ms, of successful requests. Rates are per second, from the first sending to the last end
    of a successful request. ``levels`` are the limits of goodput in ms. ``heads`` maps a role to the server's
    number of engines, if known.
    """
    good = [record for record in run.records if record.outcome == "ok"]
    # Failed requests count for the begin, so a slow failure before the first success lowers the rates.
    seconds = max(r.ended for r in good) - min(r.sent for r in run.records) if good else 0.0
    output, prompt = sum(r.output_tokens for r in good), sum(r.prompt_tokens for r in good)
    report: dict[str, Any] = {
        "setup": facts,
        "requests": _requests(run.records, good),
        "failures": failures(run.records),
        "seconds": seconds,
        "interrupted": run.interrupted,
        "timed_out": run.timed_out,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "request_throughput": ratio(len(good), seconds),
        "output_token_throughput": ratio(output, seconds),
        "total_token_throughput": ratio(output + prompt, seconds),
        "latency_ms": latencies(good),
        "goodput": _goodput(good, levels, seconds) if levels else None,
        "heads": dict(heads),
        "client": _client(run),
        "notes": _notes(run, good),
    }
    report["per_head"] = _per_head(report)
    first = next((r for r in run.records if r.outcome not in ("ok", "unfinished")), None)
    report["first_failure"] = None if first is None else f"{first.outcome}: {first.message}"
    result: dict[str, Any] = rounded(report)
    return result


def _requests(records: Sequence[RequestRecord], good: Sequence[RequestRecord]) -> dict[str, int]:
    """Return the counts of sent, successful, failed and unfinished requests."""
    unfinished = sum(record.outcome == "unfinished" for record in records)
    return {
        "sent": len(records),
        "ok": len(good),
        "failed": len(records) - len(good) - unfinished,
        "unfinished": unfinished,
    }


def latencies(good: Sequence[RequestRecord]) -> dict[str, dict[str, float] | None]:
    """Return summaries in ms of TTFT, TPOT, ITL and E2EL; None for a latency without values."""
    values: dict[str, list[float | None]] = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good],
        "itl": [*itertools.chain.from_iterable(r.itl for r in good)],
        "e2el": [r.e2el for r in good],
    }
    return {name: summary([1e3 * one for one in many if one is not None]) for name, many in values.items()}


def _goodput(good: Sequence[RequestRecord], levels: dict[str, float], seconds: float) -> dict[str, Any]:
    """Return the requests within the limits ``levels`` (ms), and their rate per second."""
    kept = 0
    for record in good:
        times = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
        kept += meets(levels, {name: None if one is None else 1e3 * one for name, one in times.items()})
    return {"levels_ms": levels, "requests": kept, "per_second": ratio(kept, seconds)}


def _per_head(report: dict[str, Any]) -> dict[str, float | None] | None:
    """Return requests and goodput per second and engine of the server, over all roles; None for an unknown
    rate.

    Return None if the number of engines is unknown.
    """
    heads = sum(report["heads"].values())
    if not heads:
        return None
    goodput = None if report["goodput"] is None else report["goodput"]["per_second"]
    rates = {"requests_per_second": report["request_throughput"], "goodput_per_second": goodput}
    return {name: None if rate is None else rate / heads for name, rate in rates.items()}


def _client(run: LoadRun) -> dict[str, Any]:
    """Return how well the load generator itself kept up: its CPU share, and the p99 of late sends in ms (None
    without send times).
    """
    late = [1e3 * (r.sent - r.planned) for r in run.records if r.planned is not None]
    return {
        "cpu_share": ratio(run.client_cpu, run.seconds),
        "late_ms_p99": percentile(late, 99) if late else None,
    }


def _notes(run: LoadRun, good: Sequence[RequestRecord]) -> list[str]:
    """Return notes that a reader of the numbers must know: missing counts, short answers, a busy client, an
    interruption.
    """
    notes = []
    # Each note names a reason to distrust a number of the report.
    unknown = sum(record.counted == "chunks" for record in good)
    if unknown:
        notes.append(f"{unknown} answers had no token count, so chunks were counted")
    short = sum(record.output_tokens < record.asked_tokens for record in good)
    if short:
        notes.append(f"{short} answers ended before the requested number of tokens")
    chunks, tokens = sum(len(r.arrivals) for r in good), sum(r.output_tokens for r in good)
    # Several tokens per chunk hide the gaps between tokens.
    if chunks and tokens > 1.1 * chunks:
        notes.append(f"a chunk had {tokens / chunks:.1f} tokens on average: ITL is the time between chunks")
    if run.seconds > 1 and run.client_cpu > _BUSY * run.seconds:
        notes.append(
            f"the load generator used {run.client_cpu / run.seconds:.0%} of a CPU, and may be the bottleneck"
        )
    if run.interrupted or run.timed_out:
        notes.append(
            "interrupted: the results cover the time until the interruption"
            if run.interrupted
            else "out of time"
        )
    return notes


def table(report: dict[str, Any]) -> str:
    """Return the report as lines for a terminal."""
    counts, goodput = report["requests"], report["goodput"]
    failed = ", ".join(f"{kind} {count}" for kind, count in report["failures"].items())
    # Optional rows appear only with content.
    rows = [
        ("requests", f"{counts['ok']} ok of {counts['sent']} sent in {report['seconds']:.2f} s"),
        *([("failed", f"{counts['failed']} ({failed})")] if failed else []),
        *([("unfinished", str(counts["unfinished"]))] if counts["unfinished"] else []),
        ("tokens", f"{report['prompt_tokens']} prompt, {report['output_tokens']} output"),
        ("requests/s", _number(report["request_throughput"])),
        ("output tok/s", _number(report["output_token_throughput"])),
        ("total tok/s", _number(report["total_token_throughput"])),
    ]
    if goodput:
        levels = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["levels_ms"].items())
        rows.append(
            ("goodput", f"{_number(goodput['per_second'])} requests/s: {goodput['requests']} kept {levels}")
        )
    if report["per_head"]:
        roles = ", ".join(f"{count} {role}" for role, count in sorted(report["heads"].items()))
        rate, kept = report["per_head"]["requests_per_second"], report["per_head"]["goodput_per_second"]
        goodput = "" if kept is None else f", goodput {_number(kept)}"
        rows.append(("each engine", f"{_number(rate)} requests/s{goodput} ({roles})"))
    lines = [f"{name:<14}{value}" for name, value in rows]
    heads = ["mean", *(f"p{share}" for share in PERCENTILES), "max"]
    lines += ["", f"{'ms':<6}" + "".join(f"{head:>11}" for head in heads)]
    for name, values in report["latency_ms"].items():
        cells = [_number(values[head]) if values else "-" for head in heads]
        lines.append(f"{_TITLES[name]:<6}" + "".join(f"{cell:>11}" for cell in cells))
    if report["first_failure"]:
        lines += ["", f"first failure: {report['first_failure']}"]
    lines += [f"note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
