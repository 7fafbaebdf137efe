"""Cost of the exchange of a routed layer, from a table of measured collectives. No torch.

    weft/moe/collectives.json            comes with the package; says on which machine it was measured
    <cache>/collectives.json             measured on this machine by ``weft bench dispatch``; goes first

    {"version": 1, "measured": [
        {"link": "shared memory", "machine": "...", "ranks": 2,
         "times": {"all_to_all": {"1024": 95.1, ...}, "all_gather": ..}}]}      microseconds, by bytes

Bytes are counted on one rank: the gathered [ranks, ..], the rows received in an exchange, the input of a sum.
``copy`` is memory written on one rank for padding and for splitting exchanged tensors.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

from weft.common.measurements import Measurements
from weft.types.layout import Layout

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "copy")


class ExchangeShape(NamedTuple):
    """Sizes of the exchange in one layer."""

    hidden: int
    top_k: int
    element: int
    """Bytes of one element."""
    exact: bool = False
    """True if experts answer one by one."""


class MeasuredExchange(NamedTuple):
    """Measured collectives among ``ranks`` ranks of one machine."""

    link: str
    machine: str
    ranks: int
    times: dict[str, dict[int, float]]
    """Kind of collective -> bytes -> microseconds."""


def _parse(row: dict[str, Any]) -> MeasuredExchange:
    times = {kind: {int(size): float(us) for size, us in row["times"][kind].items()} for kind in KINDS}
    if not all(times.values()):
        raise ValueError("a row without times")
    return MeasuredExchange(row["link"], row["machine"], int(row["ranks"]), times)


def _form(m: MeasuredExchange) -> dict[str, Any]:
    return {
        **m._asdict(),
        "times": {kind: {str(n): us for n, us in by.items()} for kind, by in m.times.items()},
    }


MEASUREMENTS = Measurements(
    "collectives", Path(__file__).with_name("collectives.json"), _parse, _form, of=lambda m: m.ranks
)


@functools.cache
def table() -> tuple[MeasuredExchange, ...]:
    """Return this machine's measurements, or else the package's. ``table.cache_clear()`` forces a reload."""
    return next((rows for rows in MEASUREMENTS.found() if rows), ())


def seconds(
    form: str, tokens: int, shape: ExchangeShape, layout: Layout, measured: MeasuredExchange | None = None
) -> float:
    """Return the seconds of one layer's exchange if every replica has ``tokens`` tokens.

    Uses ``measured``, or the table's nearest number of ranks. Without measurements every collective costs 0.1
    ms plus 1 ns per byte.
    """
    if measured is None and table():
        measured = min(table(), key=lambda m: abs(math.log2(m.ranks / layout.expert_ranks)))
    total = 0.0
    for kind, size in exchanges(form, tokens, shape, layout):
        total += size * 1e-9 + 1e-4 if measured is None else _at(measured.times[kind], size) * 1e-6
    return total


def exchanges(form: str, tokens: int, shape: ExchangeShape, layout: Layout) -> list[tuple[str, float]]:
    """Return (kind, bytes) of the collectives of a form for one layer, for randomly chosen experts.

    The kind "copy" stands for local copies. For the forms see ``dispatch``.
    """
    ranks = layout.expert_ranks
    tensor = layout.tensor
    home = -(-tokens // tensor)
    answers = shape.top_k if shape.exact else 1
    hidden_bytes = shape.hidden * shape.element
    # A row travels with 8 bytes per place, and with 4 bytes per scale unless scales stay at home.
    row = hidden_bytes + shape.top_k * (8 if shape.exact else 12)
    answer = answers * hidden_bytes
    dense = ranks * home * (row + 2 * shape.top_k * hidden_bytes)  # written by one rank for all rows
    last = [("all_gather", home * tensor * hidden_bytes)] if tensor > 1 else []
    if form == "reduce":
        dense = tokens * 2 * shape.top_k * hidden_bytes
        return [("all_reduce", tokens * answer), ("copy", dense)]
    if form == "gather":
        out = ("all_gather", ranks * home * row)
        back = ("reduce_scatter", ranks * home * answer)
        return [out, back, ("copy", dense), *last]
    if form == "low-latency":
        out = ("all_to_all", ranks * home * row)
        back = ("all_to_all", ranks * home * answer)
        return [out, back, ("copy", dense + ranks * home * row), *last]
    reached = ranks * (1 - (1 - 1 / ranks) ** shape.top_k)  # average number of ranks that a row goes to
    back_rows = shape.top_k if shape.exact else reached
    return [
        ("all_to_all", 16.0 * ranks),
        ("all_to_all", home * reached * row),
        ("all_to_all", home * back_rows * hidden_bytes),
        ("copy", home * reached * (row + 2 * shape.top_k * hidden_bytes) + home * answer),
        *last,
    ]


def _at(times: dict[int, float], size: float) -> float:
    """Return microseconds for ``size`` bytes: interpolated linearly between measured sizes, extrapolated
    beyond the last.
    """
    sizes = sorted(times)
    if size <= sizes[0] or len(sizes) == 1:
        return times[sizes[0]]
    above = next((i for i, known in enumerate(sizes) if known >= size), len(sizes) - 1)
    low = sizes[above - 1]
    high = sizes[above]
    slope = (times[high] - times[low]) / (high - low)
    return max(times[low] + slope * (size - low), 0.0)
