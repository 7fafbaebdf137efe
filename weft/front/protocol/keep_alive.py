"""The field ``keep_alive``: how long a model stays loaded without a request."""

from __future__ import annotations

import math
import re
from typing import Any

from weft.common.errors import InvalidRequest

_DURATION = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h))+|-?[0-9]+")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_S = 1e9
"""Maximum seconds. A longer time counts as this time."""


def _is_nan(given: int | float) -> bool:
    return isinstance(given, float) and math.isnan(given)


def kept_seconds(given: Any) -> float:
    """Return the seconds of a ``keep_alive``, at most ``LONGEST_S``: a number, or a duration such as 5m.
    Negative: for ever. Raises InvalidRequest."""
    if isinstance(given, (int, float)) and not isinstance(given, bool) and not _is_nan(given):
        return max(min(given, LONGEST_S), -LONGEST_S)
    if not isinstance(given, str) or len(given) > 32 or not _DURATION.fullmatch(given):
        raise InvalidRequest(
            'keep_alive must be a number of seconds or a duration such as "5m"', param="keep_alive"
        )
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", given)
    total = sum(float(value) * _UNITS[unit] for value, unit in parts) if parts else abs(float(given))
    total = min(total, LONGEST_S)
    return -total if given.startswith("-") else total
