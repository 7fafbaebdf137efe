"""What a rank's transfers tell its head, from their thread to the one that serves the head."""

from __future__ import annotations

import os
import threading
from collections import deque

from weft.transfer.events import RankReport, RankStopped


class RoomReports:
    """A queue with a descriptor that can be read from as long as something waits in it."""

    def __init__(self) -> None:
        self._waiting: deque[RankReport | RankStopped] = deque()
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def descriptor(self) -> int:
        """For polls; nobody else reads from it."""
        return self._event

    def tell(self, report: RankReport | RankStopped) -> None:
        """From any thread; does not wait. After ``close`` nobody hears it."""
        with self._lock:
            if self._event >= 0:
                if not self._waiting:
                    os.eventfd_write(self._event, 1)
                self._waiting.append(report)

    def take(self) -> list[RankReport | RankStopped]:
        """All that wait, in order; cheap when none does."""
        if not self._waiting:
            return []
        with self._lock:
            told = list(self._waiting)
            self._waiting.clear()
            if self._event >= 0:
                os.eventfd_read(self._event)
        return told

    def close(self) -> None:
        """Gives the descriptor back. What waits is dropped."""
        with self._lock:
            self._waiting.clear()
            if self._event >= 0:
                os.close(self._event)
                self._event = -1
