"""Summarize all comparisons of one machine on one page: Weft relative to each peer, with a plot.

python -m bench.summary --machine zen5          # reads bench/results/*-zen5.json of bench.compare

Weft in the model's dtype is compared with peers in the same dtype. Weft with int8 or w8a8 is compared with
peers in 8 bits; int4 and w4a8 with peers in 4 bits. If several results have the same pair, the newest counts.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import rows, tables

HERE = Path(__file__).parent
WORKLOADS = {
    "W1": "throughput, 32 at once",
    "W2": "one stream",
    "W3": "prefill",
    "W4": "over HTTP, 8 at a time",
}
PLAIN = "16 bits"


@dataclass(frozen=True, slots=True)
class Pair:
    """Hold the figures of one result for one peer and one workload."""

    model: str
    bits: str
    """Weights of Weft: ``16 bits``, ``int8``, ``w8a8``, ``int4`` or ``w4a8``."""
    peer: str
    workload: str
    ratio: tables.Spread
    """Above 1 Weft is better."""
    source: str
    """Name of the result."""


def comparison(found: Any) -> bool:
    """Return True if the content of a JSON file is a result of bench.compare."""
    return isinstance(found, dict) and {"engines", "workloads", "rounds", "model"} <= found.keys()


def pairs(result: Mapping[str, Any]) -> list[Pair]:
    """Return Weft beside each peer with the same number of bits."""
    found = []
    for peer, record in result["engines"].items():
        base, of_peer = rows.parted(peer)
        if record.get("weft"):
            continue
        # A peer with 8 or 4 bits is compared with both Weft rows of the same width.
        for bits in (of_peer, rows.ROUNDED[of_peer]) if of_peer else ("",):
            mine = f"weft-{bits}" if bits else "weft"
            own = result["engines"].get(mine)
            if own is None or not _as_named(own.get("flags", ""), bits):
                continue
            for workload in WORKLOADS:
                better = tables.TITLES.get(workload, ("", True))[1]
                both = (tables.samples(result, name, workload) for name in (mine, peer))
                ratio = tables.ratios(*both, better)  # type: ignore[call-arg]
                if ratio is not None:
                    found.append(Pair(result["model"], bits or PLAIN, base, workload, ratio, result["name"]))
    return found


def _as_named(flags: str, bits: str) -> bool:
    """Return True if the flags of a row only set ``bits``. Rows such as weft-int8 with further flags are
    excluded.
    """
    return flags == (f"--quantization {bits}" if bits else "")


def newest(results: Iterable[Mapping[str, Any]]) -> list[Pair]:
    """Return the newest pair for each model, number of bits, peer and workload, in table order."""
    kept: dict[tuple[str, str, str, str], Pair] = {}
    for result in sorted(results, key=lambda one: str(one["date"])):
        for pair in pairs(result):
            kept[pair.model, pair.bits, pair.peer, pair.workload] = pair
    return sorted(kept.values(), key=lambda pair: (pair.model, -_width(pair.bits), pair.peer, pair.workload))


def _width(bits: str) -> int:
    return int(re.findall(r"\d+", bits)[0])  # of weights


def middle(found: Sequence[Pair]) -> float:
    """Return the geometric mean of the median ratios."""
    return math.exp(sum(math.log(pair.ratio.median) for pair in found) / len(found))


def headline(found: Sequence[Pair]) -> list[str]:
    """Return one line per number of bits. Only the fastest peer of each model and workload counts."""
    lines = []
    for bits in dict.fromkeys(pair.bits for pair in found):
        best: dict[tuple[str, str], Pair] = {}
        for pair in found:
            key = (pair.model, pair.workload)
            if pair.bits == bits and (key not in best or pair.ratio.median < best[key].ratio.median):
                best[key] = pair
        chosen = list(best.values())
        ahead = sum(pair.ratio.median > 1 for pair in chosen)
        worst = min(chosen, key=lambda pair: pair.ratio.median)
        lines.append(
            f"* {bits}: against the fastest peer of each model and workload {middle(chosen):.2f} times "
            f"better (geometric mean), ahead in {ahead} of {len(chosen)}; least {worst.ratio.median:.2f} "
            f"({worst.model}, {worst.workload}, {worst.peer})."
        )
    return lines


def table(found: Sequence[Pair]) -> list[str]:
    """Return a row for each model, number of bits and peer."""
    lines = [
        f"| model | weights | Weft / | {' | '.join(WORKLOADS)} |",
        "|---|---|---|" + "---|" * len(WORKLOADS),
    ]
    for key in dict.fromkeys((pair.model, pair.bits, pair.peer) for pair in found):
        cells = {p.workload: p.ratio.text() for p in found if (p.model, p.bits, p.peer) == key}
        lines.append("| " + " | ".join([*key, *(cells.get(name, "-") for name in WORKLOADS)]) + " |")
    return lines


def absent(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the failures of peers with their messages, from the newest result with a failure."""
    said: dict[tuple[str, str], str] = {}
    for result in sorted(results, key=lambda one: str(one["date"])):
        for name in result["engines"]:
            said.pop((result["model"], name), None)
        for name, why in result["missing"].items():
            said[result["model"], name] = why
        for name, record in result["engines"].items():
            error = record.get("error") or record.get("server", {}).get("error")
            if error:
                said[result["model"], name] = error.splitlines()[0]
    return [f"* {model}, {name}: {why}" for (model, name), why in sorted(said.items())]


def page(results: Sequence[Mapping[str, Any]], plot: str) -> str:
    """Return the Markdown page. ``plot`` is the name of the picture beside it, or ""."""
    found = newest(results)
    used = {pair.source for pair in found}
    newest_one = max(results, key=lambda one: str(one["date"]))
    cpu = newest_one["machine"]["cpu"]
    lines = [
        f"# Weft beside other engines: {cpu['model']} (family {cpu['family']}, model {cpu['model_number']}), "
        f"{newest_one['threads']} threads",
        "",
        "How many times better Weft is, round by round in the same run: median (smallest to largest). Above "
        "1 Weft is better, whichever way the measure points. "
        + "; ".join(f"{name}: {about}" for name, about in WORKLOADS.items())
        + ". Absolute numbers, versions and conditions are in the results that the last lines name.",
        "",
        *headline(found),
        "",
        *([f"![how many times better, by workload and model]({plot})", ""] if plot else []),
        *table(found),
    ]
    missing = absent(one for one in results)
    if missing:
        lines += ["", "Failures of peers on this machine:", "", *missing]
    lines += ["", "Results:", ""]
    for one in sorted(results, key=lambda one: str(one["name"])):
        if one["name"] in used:
            lines.append(f"* [{one['name']}]({one['name']}.md): {one['date'][:10]}, {one['rounds']} rounds")
    return "\n".join(lines) + "\n"


def read(folder: Path, machine: str) -> list[dict[str, Any]]:
    """Return the comparisons in ``folder`` whose file names end with ``machine``."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{machine}.json"))]
    return [one for one in found if comparison(one)]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--machine", required=True, help="ending of the result names, e.g. zen5")
    made.add_argument("--results", type=Path, default=HERE / "results", help="folder read and written")
    made.add_argument(
        "--no-plot", action="store_true", help="write no picture, so that matplotlib is not needed"
    )
    args = made.parse_args()
    results = read(args.results, args.machine)
    found = newest(results)
    if not found:
        sys.exit(
            f"summary: {args.results} has no comparison *-{args.machine}.json with Weft and a peer in it"
        )
    name = f"summary-{args.machine}"
    if not args.no_plot:
        from weft.bench.plots import plot_ratios

        ratios = {
            workload: [
                (f"{p.model}, {p.bits}", p.peer, p.ratio.low, p.ratio.median, p.ratio.high)
                for p in found
                if p.workload == workload
            ]
            for workload in WORKLOADS
        }
        titles = {workload: f"{workload}: {about}" for workload, about in WORKLOADS.items()}
        plot_ratios(ratios, titles, args.results / f"{name}.svg")
    text = page(results, "" if args.no_plot else f"{name}.svg")
    (args.results / f"{name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
