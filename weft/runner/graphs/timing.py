"""Time of a replayed step on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch

K = TypeVar("K", bound=Hashable)


class Timing(Protocol):
    """Measures the work that is launched between ``begin`` and ``end``."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def seconds(self) -> float:
        """Return the time of the work. Call only after the host has waited for later work of the stream."""


class CudaTiming:
    """Two events around work on the current stream. The host waits for neither event.

    The time includes waits for other ranks inside collectives.
    """

    def __init__(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        self._began.record()

    def end(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        return self._began.elapsed_time(self._ended) / 1e3


class Timings(Generic[K]):
    """Makes at most ``most`` measurements of the replays of each graph, as many as a trial can use."""

    def __init__(self, make: Callable[[], Timing] | None, most: int) -> None:
        """``make``: see ``GraphOptions.timing``."""
        self._make, self._most = make, most
        self._made: Counter[K] = Counter()

    def make(self, key: K) -> Timing | None:
        """Return the measurement of the next replay of ``key``; None if the replay is not measured."""
        if self._make is None or self._made[key] >= self._most:
            return None
        self._made[key] += 1
        return self._make()

    def clear(self) -> None:
        """Forget the number of measurements."""
        self._made.clear()
