"""A directory that is read in a thread, so that a slow directory stops no event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from weft.control.directory.record import DirectoryReader, EngineRecord

READ_S = 0.5
"""Seconds between two reads."""
STALE_S = 3.0
"""Age in seconds from which the last read counts as a failed read."""


class CachedDirectory:
    """Implementation of ``DirectoryReader`` for readers, over another directory. ``read`` never waits."""

    def __init__(self, directory: DirectoryReader, interval: float = READ_S) -> None:
        """Read ``directory`` once, then again every ``interval`` seconds in a thread."""
        self._directory, self._interval = directory, interval
        self._last: Mapping[str, EngineRecord] = {}
        self._failed: OSError | None = None
        self._at = time.monotonic()
        self._over = threading.Event()
        self._read()
        self._thread = threading.Thread(target=self._run, name="weft-directory", daemon=True)
        self._thread.start()

    def read(self) -> Mapping[str, EngineRecord]:
        """See ``DirectoryReader``. Raise OSError if the last read failed, or takes over ``STALE_S``."""
        failed = self._failed
        if failed is not None:
            raise failed
        if time.monotonic() - self._at > STALE_S:
            raise OSError(f"no answer for {STALE_S:g} seconds")
        return self._last

    def ask_drain(self, record: EngineRecord) -> None:
        """See ``DirectoryReader``."""
        self._directory.ask_drain(record)

    def close(self) -> None:
        """End the thread after its present read. Idempotent."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._read()

    def _read(self) -> None:
        try:
            self._last = self._directory.read()
            self._failed = None
        except OSError as error:
            self._failed = error
        self._at = time.monotonic()
