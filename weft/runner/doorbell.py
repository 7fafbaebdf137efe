"""Wakes a loop that sleeps on descriptors."""

from __future__ import annotations

import contextlib
import os


class Doorbell:
    """Rung from any thread, heard by one."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once it was rung, until ``hear``."""

    def ring(self) -> None:
        """Does not wait."""
        with contextlib.suppress(OSError):  # closed, or rung very often
            os.eventfd_write(self.descriptor, 1)

    def hear(self) -> None:
        """It is silent again."""
        with contextlib.suppress(OSError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """It is not rung any more."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
