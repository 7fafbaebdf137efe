"""Wakes a loop that sleeps on descriptors."""

from __future__ import annotations

import contextlib
import os


class Doorbell:
    """A descriptor that wakes one thread; rung from any."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once it was rung, until ``hear``."""

    def ring(self) -> None:
        """Does not wait."""
        with contextlib.suppress(OSError):  # closed, or rung very often
            os.eventfd_write(self.descriptor, 1)

    def hear(self) -> None:
        """Takes in that it was rung."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Closes it; from then on ringing does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
