"""Staging of columns from host to device: each step in flight owns its buffers.

    host   | column | column | ...            pinned if the device is a GPU
             └── one copy ──┐
    device | column | column | ...            the same memory if the device is the CPU

A buffer returns to the ring after the result of its step was read. Until then no other step writes the
buffer, so a running copy always sees complete columns. ``poison`` fills a recycled buffer with absurd
indices, so that a step that still reads the buffer fails loudly.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from weft.common.errors import EngineDead

POISON = -(1 << 62)


class StagingBuffer:
    """int64 columns of one step, appended on the host and copied to the device at once.

    Views returned by ``tensor`` are valid until the buffer is released.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        """Allocate memory for ``capacity`` int64 numbers; pinned and with a copy on the device if the device
        is a GPU."""
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
        """Empty the buffer and make room for ``total`` entries."""
        if total > len(self._numpy):
            self._allocate(max(total, 2 * len(self._numpy)))
        self._used = 0

    def add(self, column: np.ndarray) -> slice:
        """Append a column and return its slice for ``tensor``. Raises EngineDead beyond the capacity."""
        end = self._used + len(column)
        if end > len(self._numpy):
            raise EngineDead("a step staged more than it reserved")
        where = slice(self._used, end)
        self._numpy[where] = column
        self._used = end
        return where

    def upload(self) -> None:
        """Start the copy to the device. No copy is needed on a CPU."""
        if self._cuda:
            self._on_device[: self._used].copy_(self._host[: self._used], non_blocking=True)
            assert self._event is not None
            self._event.record()

    def tensor(self, where: slice) -> torch.Tensor:
        """Return the int64 view of a column on the device. Call after ``upload``."""
        return self._on_device[where]

    def wait(self, deadline: float) -> None:
        """Wait until no copy reads the host memory. Raises EngineDead after ``deadline`` (monotonic
        seconds)."""
        while self._event is not None and not self._event.query():
            if time.monotonic() > deadline:
                raise EngineDead("a staging copy did not finish in time")
            time.sleep(0.0001)

    @torch.inference_mode()  # a buffer that grew was allocated in this mode: no other mode may write
    def poison(self) -> None:
        """Overwrite the buffer on host and device, so that any later use is noticed."""
        self._host.fill_(POISON)
        self._on_device.fill_(POISON)


class StagingRing:
    """Ring of staging buffers, one per step in flight."""

    def __init__(
        self, device: torch.device, depth: int, *, poison: bool = False, timeout: float = 60.0
    ) -> None:
        self._make = lambda: deque(StagingBuffer(device, 4096) for _ in range(depth))
        self._free = self._make()
        self._poison = poison
        self._timeout = timeout

    def acquire(self) -> StagingBuffer:
        """Take a free buffer out of the ring, after the last copy of the buffer has ended. The caller calls
        ``begin``, and later ``release``.

        Raises EngineDead if more steps are in flight than the ring has buffers, or if the last copy does not
        end within the time-out of the ring.
        """
        if not self._free:
            raise EngineDead("more steps in flight than staging buffers")
        buffer = self._free.popleft()
        buffer.wait(time.monotonic() + self._timeout)
        return buffer

    def clear(self) -> None:
        """Replace all buffers by new buffers: failed steps never return theirs."""
        self._free = self._make()

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer after the result of its step was read."""
        if self._poison:
            buffer.wait(time.monotonic() + self._timeout)
            buffer.poison()
        self._free.append(buffer)
