"""Arithmetic of reports: percentiles, summaries, service levels. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.common.errors import ConfigError

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` percent lie; linear between neighbours, like numpy's default.

    Raise ValueError for no values or a share outside 0..100.
    """
    if not values or not 0 <= share <= 100:
        raise ValueError("a percentile needs values and a share from 0 to 100")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, p50, p90, p99 and max in the unit of ``values``; None without values."""
    if not values:
        return None
    found = {"mean": math.fsum(values) / len(values)}
    found |= {f"p{share}": percentile(values, share) for share in PERCENTILES}
    return {**found, "max": max(values)}


METRICS = ("ttft", "tpot", "e2el")


def parse_levels(words: Sequence[str]) -> dict[str, float]:
    """Return {metric: milliseconds} for ``["ttft:500", "tpot:50"]``.

    Raise ConfigError for another form, and for a metric given twice.
    """
    levels: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in METRICS or name in levels or not limit > 0 or math.isinf(limit):
            raise ConfigError(
                f"--goodput takes METRIC:MILLISECONDS, each of {', '.join(METRICS)} once, not {word!r}",
                param="--goodput",
            )
        levels[name] = limit
    return levels


def meets(levels: dict[str, float], times: dict[str, float | None]) -> bool:
    """Return True if a request met every level. ``times`` are in ms.

    A missing time (None, such as the TPOT of a single token) meets its level.
    """
    return all((found := times[name]) is None or found <= limit for name, limit in levels.items())


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None if ``whole`` is not positive."""
    return part / whole if whole > 0 else None


def rounded(data: Any, digits: int = 4) -> Any:
    """Return ``data`` (JSON) with floats rounded to ``digits`` decimals."""
    if isinstance(data, float):
        return round(data, digits)
    if isinstance(data, dict):
        return {key: rounded(value, digits) for key, value in data.items()}
    if isinstance(data, list):
        return [rounded(value, digits) for value in data]
    return data
