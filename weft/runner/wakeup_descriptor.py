"""Wake-up descriptor for a loop that waits on file descriptors."""

from __future__ import annotations

import contextlib
import os
import weakref


class WakeupDescriptor:
    """Eventfd that wakes one waiting thread. Any thread may ring."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable from ``ring`` until ``clear``. -1 after ``close``."""
        self._close = weakref.finalize(self, os.close, self.descriptor)
        """Closes the descriptor once: in ``close``, or when nobody uses this object any more."""

    def ring(self) -> None:
        """Make the descriptor readable. Does not block."""
        with contextlib.suppress(OSError, ValueError):  # the counter is full, or closed
            os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Reset the descriptor to not readable. Does not block."""
        with contextlib.suppress(OSError, ValueError):  # nobody rang, or closed
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Close the descriptor. Later calls of ``ring`` do nothing. Idempotent."""
        self.descriptor = -1
        self._close()
