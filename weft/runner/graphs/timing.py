"""Time of a replayed step on the device."""

from __future__ import annotations

from typing import Protocol

import torch


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
