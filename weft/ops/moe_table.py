"""Form of the experts of a routed block in torch: a table of measurements, looked up by size.

    weft/ops/moe_table.json                   comes with the package; says on which machines it was measured
    <cache>/moe_table.json                    measured on this machine by ``weft bench moe-table``; goes first

    {"version": 1, "measured": [
        {"device": "cpu", "machine": "...", "dtype": "bfloat16",
         "experts": 32, "top_k": 4, "hidden": 512, "intermediate": 256,
         "times": {"1": {"loop": 310.0, "gather": 95.1}, "8": ...}}]}       microseconds, by tokens and form

A lookup takes the nearest measured block of the device and dtype, in doublings of experts, of top_k and of
the expert size. At the nearest number of tokens, the fastest usable form is the result. Without a measurement
the result is the first usable form of ``FORMS``.

The C++ form of the CPU extension needs no table: its choices follow from the tokens of each expert.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

from weft.common.measurements import Measurements

FORMS = ("triton", "grouped", "loop", "gather")
"""triton: Weft's own grouped product; grouped: ``torch._grouped_mm``; loop: one expert after another; gather:
each token's matrices copied side by side."""


class Size(NamedTuple):
    """Sizes of a routed block that decide the form."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


class Measured(NamedTuple):
    """Measured times of one block on one device."""

    device: str
    """Device type, ``cpu`` or ``cuda``."""
    machine: str
    dtype: str
    size: Size
    times: dict[int, dict[str, float]]
    """Number of tokens -> form -> microseconds."""


def _parse(row: dict[str, Any]) -> Measured:
    """Return a row of a table file as ``Measured``.

    Raises KeyError, TypeError or ValueError for an invalid row.
    """
    times = {int(n): {form: float(us) for form, us in by.items()} for n, by in row["times"].items()}
    if not times or not all(times.values()):
        raise ValueError("a row without times")
    size = Size(*(int(row[name]) for name in Size._fields))
    return Measured(row["device"], row["machine"], row["dtype"], size, times)


def _form(m: Measured) -> dict[str, Any]:
    """Return a row as JSON values, the inverse of ``_parse``."""
    return {
        "device": m.device,
        "machine": m.machine,
        "dtype": m.dtype,
        **m.size._asdict(),
        "times": {str(n): by for n, by in m.times.items()},
    }


MEASUREMENTS = Measurements(
    "routed blocks", Path(__file__).with_name("moe_table.json"), _parse, _form, of=lambda m: m.device
)


@functools.cache
def tables() -> tuple[tuple[Measured, ...], ...]:
    """Return this machine's table, if any, and the package's. ``tables.cache_clear()`` forces a reload."""
    return MEASUREMENTS.found()


@functools.cache
def choose(device: str, dtype: str, tokens: int, size: Size, usable: tuple[str, ...]) -> str:
    """Return the fastest form of ``usable``, which must contain ``loop`` or ``triton``, for ``tokens``
    tokens.

    Uses the nearest measured size and token count; without measurements, the first usable form of ``FORMS``.
    Cached.
    """
    for table in tables():
        fitting = [m for m in table if m.device == device and m.dtype == dtype]
        if not fitting:
            continue
        near = min(fitting, key=lambda m: _distance(m.size, size))
        # Nearest measured token count, in doublings.
        at = min(near.times, key=lambda n: abs(math.log2(n / max(1, tokens))))
        known = {form: us for form, us in near.times[at].items() if form in usable}
        if known:
            return min(known, key=lambda form: known[form])
    return next(form for form in FORMS if form in usable)


def _distance(a: Size, b: Size) -> float:
    """Return the sum of the differences in experts, top_k and expert size, in doublings."""
    ratios = (
        a.experts / b.experts,
        a.top_k / b.top_k,
        a.hidden * a.intermediate / (b.hidden * b.intermediate),
    )
    return sum(abs(math.log2(ratio)) for ratio in ratios)
