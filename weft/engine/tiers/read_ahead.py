"""Reads of records, one run of records ahead of the check and the copy of the run before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from weft.store.errors import RecordError
from weft.store.reading import Run
from weft.store.record_store import RecordStore
from weft.store.records import RecordBuffer, RecordId

RUN_BYTES = 4 << 20
"""Bytes of one read. Larger reads are not quicker; the check of a run takes a fifth of the read."""
_HEADERS = 1 << 18
"""Room for the headers of a run of small records. A run ends early without room."""


class ReadAhead:
    """Reads records in a second thread. Used by one thread at a time."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes``: of the largest payload."""
        size = max(most_bytes, RUN_BYTES + _HEADERS)
        self.buffers = (RecordBuffer(size), RecordBuffer(size))
        self._wanted: queue.SimpleQueue[tuple[RecordStore, Sequence[RecordId], RecordBuffer] | None]
        self._wanted = queue.SimpleQueue()
        self._read: queue.SimpleQueue[Run | Exception] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def runs(
        self, store: RecordStore, records: Sequence[RecordId]
    ) -> Iterator[list[np.ndarray | RecordError]]:
        """Yield the results of ``RecordStore.check_run`` for one run after the other, until all ``records``
        are read. A result is valid until the next. Raises the errors of the reading thread."""
        at, side = 0, 0
        run = store.read_run(records, self.buffers[0])
        while True:
            at, side = at + len(run.records), 1 - side
            more = at < len(records)
            if more:
                self._begin(store, records[at:], self.buffers[side])
            try:
                yield store.check_run(run)
            finally:
                # Also after an error of the caller: no read is left under way.
                read = self._read.get() if more else None
            if read is None:
                return
            if isinstance(read, Exception):
                raise read
            run = read

    def close(self) -> None:
        """End the thread, unless a stuck disk holds the thread."""
        self._wanted.put(None)

    def _begin(self, store: RecordStore, records: Sequence[RecordId], buffer: RecordBuffer) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-tier-reads", daemon=True)
            self._thread.start()
        self._wanted.put((store, records, buffer))

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            store, records, buffer = wanted
            try:
                self._read.put(store.read_run(records, buffer))
            except Exception as error:  # the caller raises the error
                self._read.put(error)
