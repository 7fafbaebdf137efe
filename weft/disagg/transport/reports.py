"""Reports from a thread of a rank (transfers, KV tier) to the thread that serves the engine process."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Generic, TypeAlias, TypeVar

from weft.disagg.protocol.transfer_events import RankReport, RankStopped

R = TypeVar("R")


class ReportQueue(Generic[R]):
    """Queue with a file descriptor, readable while the queue is not empty."""

    def __init__(self) -> None:
        self._waiting: deque[R] = deque()
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def descriptor(self) -> int:
        """File descriptor for polling. Only ``take`` reads from the descriptor."""
        return self._event

    def tell(self, report: R) -> None:
        """Append a report. Callable from any thread; does not block. Ignored after ``close``."""
        with self._lock:
            if self._event >= 0:
                if not self._waiting:
                    os.eventfd_write(self._event, 1)
                self._waiting.append(report)

    def take(self) -> list[R]:
        """Remove and return all reports, in order. Cheap for an empty queue."""
        if not self._waiting:
            return []
        with self._lock:
            told = list(self._waiting)
            self._waiting.clear()
            if self._event >= 0:
                os.eventfd_read(self._event)
        return told

    def close(self) -> None:
        """Close the descriptor and drop all waiting reports."""
        with self._lock:
            self._waiting.clear()
            if self._event >= 0:
                os.close(self._event)
                self._event = -1


TransferReports: TypeAlias = ReportQueue[RankReport | RankStopped]
"""Reports of a rank's transfers."""
