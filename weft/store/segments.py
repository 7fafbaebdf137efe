"""The disk tier: records in segments of one folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.disagg.protocol import digests
from weft.store.records import Changes, Owner, RecordBuffer, RecordId, Stored

Digests = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(memory uint8 [n], spans int64 [k, 2], seeds uint64 [k]) -> uint64 [k], see ``digests.digest_spans``."""


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of a store."""

    folder: Path
    namespace: str
    budget: int
    ttl: float = 7 * 86400.0
    write_rate: float = 0.0
    shared: bool = False
    direct: bool = True


class SegmentStore:
    """Records of one namespace, as one process sees them."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        digest: Digests = digests.digest_spans,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.off = ""
        """The reason why the store has turned itself off; "" while the store is on."""

    def find(self, kind: int, key: bytes) -> Stored | None:
        """Return the block if all parts are there. Any thread."""
        return None

    def has(self, record: RecordId) -> bool:
        """Return True if the record is there. Any thread."""
        return False

    def write(self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner | None = None) -> str:
        """Store ``buffer.payload[:nbytes]``. Return "" or why not: there, rate, off, large, room."""
        return "off"

    def read(self, record: RecordId, buffer: RecordBuffer) -> int:
        """Read a record into ``buffer.payload`` and return the number of bytes. Raises RecordError."""
        raise NotImplementedError

    def scan(self) -> Changes:
        """Read the folder again. Return what came and went since the last call."""
        return Changes([], [])

    def maintain(self) -> None:
        """Apply age, budget and use times."""

    def flush(self, *, payer: str | None = None, salt: str | None = None, session: str | None = None) -> int:
        """Remove the records that match all given fields. Return the number of records."""
        return 0

    def seal(self) -> None:
        """Make the records of this process durable and visible to others."""

    def close(self) -> None:
        """Seal and close."""
