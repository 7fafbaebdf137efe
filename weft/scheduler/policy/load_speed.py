"""Predicted seconds of loads from a KV tier: latency + bytes / rate, both measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGE = 1 << 20
"""Bytes from which a command measures the rate. Smaller commands measure the latency."""
_NEW = 0.3
"""Weight of a new measurement."""
_TRUST = 1.02
"""Factor for each refused load: the rate grows and the latency shrinks, up to the best measurement. A refused
load is no measurement. Without the factor, a disk that was slow once would never be tried again."""


class LoadSpeed:
    """Latency and rate of one level of a tier, as one rank sees the level.

    Before the first measurement a load takes no time: the first load is the measurement. A slow store is
    found after one command.
    """

    def __init__(self) -> None:
        self.rate, self.latency = math.inf, 0.0
        """Bytes per second; seconds of a command."""
        self._best_rate, self._best_latency = 0.0, math.inf

    def seconds(self, nbytes: int) -> float:
        """Return the predicted seconds until ``nbytes`` are loaded."""
        return self.latency + nbytes / self.rate

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record a command that loaded ``nbytes`` in ``seconds``, both above 0."""
        if nbytes < LARGE:
            self._best_latency = min(self._best_latency, seconds)
            self.latency += _NEW * (seconds - self.latency)
            return
        rate = nbytes / seconds
        self._best_rate = max(self._best_rate, rate)
        self.rate = rate if self.rate == math.inf else self.rate + _NEW * (rate - self.rate)

    def refused(self) -> None:
        """Note that a load was not begun because of the predicted seconds."""
        self.rate = max(self.rate, min(self.rate * _TRUST, self._best_rate))
        self.latency = min(self.latency, max(self.latency / _TRUST, self._best_latency))


class LoadSpeeds:
    """The speeds of all levels of a tier. Bytes are given for each level, in order of ``LEVELS``."""

    def __init__(self, levels: int) -> None:
        self.levels = [LoadSpeed() for _ in range(levels)]

    def seconds(self, nbytes: Sequence[int]) -> float:
        """Return the predicted seconds until all bytes are loaded, one level after the other."""
        each = zip(self.levels, nbytes, strict=True)
        return sum(speed.seconds(one) for speed, one in each if one)

    def refused(self, nbytes: Sequence[int]) -> None:
        """Note that a load was not begun because of the predicted seconds."""
        for speed, one in zip(self.levels, nbytes, strict=True):
            if one:
                speed.refused()
