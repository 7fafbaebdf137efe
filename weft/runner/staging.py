"""Host to device staging: each step in flight owns its buffers.

    host   | column | column | ...            pinned where the device is a GPU
             └── one copy ──┐
    device | column | column | ...            the same memory where the device is the CPU

A buffer goes back to the ring when its step's result was read; until then nobody rewrites it, so a copy
that is still in flight can't be torn. ``poison`` fills a recycled buffer with absurd indices: a step that
still looked at it would fail loudly.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from weft.common.errors import EngineDead

POISON = -(1 << 62)


class StagingBuffer:
    """Columns of one step, int64, appended on the host and copied in one piece.

    Views returned by ``tensor`` are valid until the buffer is released.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._allocate(capacity)
        self._used = 0
        self._event = torch.cuda.Event() if self._cuda else None

    def _allocate(self, capacity: int) -> None:
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=self._cuda)
        self._numpy = self._host.numpy()
        self._on_device = torch.empty_like(self._host, device=self._device) if self._cuda else self._host

    def begin(self, total: int) -> None:
        """Empties the buffer and makes room for ``total`` entries."""
        if total > len(self._numpy):
            self._allocate(max(total, 2 * len(self._numpy)))
        self._used = 0

    def add(self, column: np.ndarray) -> slice:
        """Appends a column; the slice names it for ``tensor``. Raises EngineDead beyond ``begin``'s total."""
        end = self._used + len(column)
        if end > len(self._numpy):
            raise EngineDead("a step staged more than it reserved")
        where = slice(self._used, end)
        self._numpy[where] = column
        self._used = end
        return where

    def upload(self) -> None:
        """Starts the copy. On the CPU there is none to make."""
        if self._cuda:
            self._on_device[: self._used].copy_(self._host[: self._used], non_blocking=True)
            assert self._event is not None
            self._event.record()

    def tensor(self, where: slice) -> torch.Tensor:
        """int64 view on the device of a column; call after ``upload``."""
        return self._on_device[where]

    def wait(self, deadline: float) -> None:
        """Waits until no copy reads the host side. Raises EngineDead after ``deadline`` (monotonic s)."""
        while self._event is not None and not self._event.query():
            if time.monotonic() > deadline:
                raise EngineDead("a staging copy did not finish in time")
            time.sleep(0.0001)

    @torch.inference_mode()  # a buffer that grew did so in this mode, and can be written in no other
    def poison(self) -> None:
        """Fills the buffer, on the device too, so that any later use shows."""
        self._host.fill_(POISON)
        self._on_device.fill_(POISON)


class StagingRing:
    """A ring of staging buffers, as many as steps may be in flight."""

    def __init__(
        self, device: torch.device, depth: int, *, poison: bool = False, timeout: float = 60.0
    ) -> None:
        self._make = lambda: deque(StagingBuffer(device, 4096) for _ in range(depth))
        self._free = self._make()
        self._poison = poison
        self._timeout = timeout

    def acquire(self) -> StagingBuffer:
        """A buffer that no step uses; its user calls ``begin``.

        Raises EngineDead when more steps are in flight than the ring holds.
        """
        if not self._free:
            raise EngineDead("more steps in flight than staging buffers")
        buffer = self._free.popleft()
        buffer.wait(time.monotonic() + self._timeout)
        return buffer

    def clear(self) -> None:
        """Takes new buffers in place of all: steps that failed never give theirs back."""
        self._free = self._make()

    def release(self, buffer: StagingBuffer) -> None:
        """Gives a buffer back; its step's result was read."""
        if self._poison:
            buffer.wait(time.monotonic() + self._timeout)
            buffer.poison()
        self._free.append(buffer)
