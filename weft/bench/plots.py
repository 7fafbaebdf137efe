"""Plots of reports, with matplotlib (the extra ``bench``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is missing. Call before a run, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'weft[bench]', or leave --plot out", param="--plot"
        ) from None


def _figure(width: float, height: float, panels: int) -> tuple[Any, Sequence[Any]]:
    """Return (figure, one axes per panel); sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for one in axes:
        one.grid(True, alpha=0.3)
    return figure, list(axes)


def plot_serving(report: dict[str, Any], path: Path) -> None:
    """Write bars of p50, p90 and p99, one panel per latency, as PNG to ``path``."""
    found = {name: values for name, values in report["latency_ms"].items() if values}
    figure, axes = _figure(2.6 * max(len(found), 1), 3.2, max(len(found), 1))
    for panel, (name, values) in zip(axes, found.items(), strict=False):
        shares = [share for share in values if share.startswith("p")]
        bars = panel.bar(shares, [values[share] for share in shares], color="tab:blue")
        panel.bar_label(bars, fmt="%.4g", fontsize=8)
        panel.set_title(name.upper())
        panel.set_ylabel("ms")
        panel.grid(False, axis="x")
    rate = report["output_token_throughput"]
    figure.suptitle(f"{report['setup']['model']}: {rate or 0:,.0f} output tok/s", fontsize=10)
    figure.savefig(path, dpi=130, format="png")


def plot_ratios(
    found: dict[str, list[tuple[str, str, float, float, float]]], titles: dict[str, str], path: Path
) -> None:
    """Write one panel per workload, with one row per group and one mark with its spread per peer.

    ``found`` maps a workload to (group, peer, smallest, median, largest ratio). A line marks ratio 1. The
    suffix of ``path`` gives the format.
    """
    import matplotlib

    groups = list(dict.fromkeys(one[0] for points in found.values() for one in points))[::-1]
    peers = sorted({one[1] for points in found.values() for one in points})
    figure, axes = _figure(3.2 * len(found), 1.6 + 0.55 * len(groups), len(found))
    for panel, (workload, points) in zip(axes, found.items(), strict=True):
        for number, peer in enumerate(peers):
            of_peer = [one for one in points if one[1] == peer]
            # Spread the marks of a row vertically, so peers do not overlap.
            shift = 0.6 * ((number + 0.5) / len(peers) - 0.5)
            heights = [groups.index(one[0]) - shift for one in of_peer]
            middles = [one[3] for one in of_peer]
            sides = [[one[3] - one[2] for one in of_peer], [one[4] - one[3] for one in of_peer]]
            style = {"fmt": "oDs^vPX*"[number % 8], "color": f"C{number}", "label": peer, "markersize": 5}
            panel.errorbar(middles, heights, xerr=sides, **style)
        _log_ratios(panel, [value for one in points for value in one[2:]])
        panel.set_yticks(range(len(groups)), groups if panel is axes[0] else [""] * len(groups))
        panel.set_ylim(-0.6, len(groups) - 0.4)
        panel.set_title(titles[workload], fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(peers), fontsize=8)
    figure.suptitle("How many times better Weft is: right of the line it is ahead", fontsize=10)
    # equal numbers give an equal file
    with matplotlib.rc_context({"svg.hashsalt": "weft"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _log_ratios(panel: Any, values: Sequence[float]) -> None:
    """Set a logarithmic axis around 1 with plain numbers."""
    low, high = min([*values, 1.0]), max([*values, 1.0])
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low / 2 < tick < high * 2]
    panel.set_xscale("log")
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlim(low / 1.25, high * 1.25)
    panel.axvline(1.0, color="black", linewidth=1)


def plot_sweep(result: dict[str, Any], title: str, path: Path) -> None:
    """Write two panels as PNG: throughput, TTFT and TPOT by concurrency; prefill time and TPOT by context."""
    figure, (left, right) = _figure(11, 4.2, 2)
    _panel(left, result["concurrency"], "concurrency", "TTFT")
    _panel(right, result["context"], "context", "prefill (TTFT)")
    left.set_xlabel("concurrent requests")
    right.set_xlabel("prompt tokens")
    twin = left.twinx()
    points = [p for p in result["concurrency"] if p.get("output_token_throughput")]
    rates = [p["output_token_throughput"] for p in points]
    twin.plot([p["concurrency"] for p in points], rates, "s--", color="tab:green", label="output tok/s")
    twin.set_ylabel("output tok/s", color="tab:green")
    twin.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130, format="png")


def plot_depths(found: dict[str, Sequence[dict[str, Any]]], title: str, path: Path) -> None:
    """Write two panels as PNG, decode and prefill: ms per token by context, one line per entry of ``found``.

    A dashed line shows the time with attention to the context at its floor. Rows have the fields
    ``{kind}_ms`` and ``{kind}_floor_ms``.
    """
    figure, axes = _figure(11, 4.6, 2)
    for panel, kind in zip(axes, ("decode", "prefill"), strict=True):
        for number, (name, rows) in enumerate(found.items()):
            contexts = [row["context"] for row in rows]
            least = [rows[0][f"{kind}_ms"] + row[f"{kind}_floor_ms"] for row in rows]
            colour = f"C{number}"
            panel.plot(contexts, [row[f"{kind}_ms"] for row in rows], "o-", color=colour, label=name)
            panel.plot(contexts, least, "--", color=colour, linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("positions before")
        panel.set_ylabel("ms per token")
        panel.set_title(f"{kind} (dashed: with attention at its floor)", fontsize=9)
        panel.legend(loc="upper left", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130, format="png")


def _panel(panel: Any, points: Sequence[dict[str, Any]], axis: str, first: str) -> None:
    """Draw TTFT and TPOT (p50, ms) of the points by ``axis``. ``first``: label of TTFT."""
    for name, label, style in (("ttft_ms", first, "o-"), ("tpot_ms", "TPOT", "^-")):
        good = [point for point in points if point.get(name)]
        values = [point[name]["p50"] for point in good]
        panel.plot([point[axis] for point in good], values, style, label=f"{label} p50")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_ylabel("ms")
    # A panel without data gets no ticks.
    if panel.lines and any(len(line.get_xdata()) for line in panel.lines):
        panel.set_xticks([point[axis] for point in points], [str(point[axis]) for point in points])
    panel.legend(loc="upper left", fontsize=8)
