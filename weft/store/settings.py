"""Settings and counts of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

SEGMENT_BYTES = 128 << 20
LEAST_BUDGET = 16 << 20


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Settings of a store."""

    folder: Path
    """Root folder. The records are in a subfolder with the name of the namespace."""
    namespace: str
    """32 hex digits, see ``weft.store.namespace``. Records of other namespaces are never read."""
    budget: int
    """Bytes on disk of all namespaces and processes."""
    ttl: float = 7 * 86400.0
    """Seconds after which a record is not read any more and is removed; 0: never."""
    write_rate: float = 0.0
    """Maximum bytes written per second; 0: no limit."""
    shared: bool = False
    """Allow a folder on a network file system."""
    direct: bool = True
    """Read and write past the page cache, if the file system can."""
    segment_bytes: int = SEGMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """Settings of a remote store."""

    namespace: str
    """32 hex digits."""
    ttl: float = 7 * 86400.0
    """Seconds after which a record is not read any more and is removed; 0: never."""
    segment_bytes: int = 32 << 20
    """Bytes of one object."""
    list_s: float = 5.0
    """Seconds between two lists of new segments."""
    open_s: float = 10.0
    """Age at which a segment is uploaded, so that other hosts find recent blocks."""
    away_s: float = 5.0
    """Seconds without requests after the first failure."""


class StoreStats(NamedTuple):
    """Counts since the start; ``nbytes`` and ``records`` are gauges."""

    nbytes: int
    """Bytes on disk of the root folder, as last counted."""
    records: int
    """Records that this process can read."""
    written: int
    written_bytes: int
    read: int
    read_bytes: int
    corrupt: int
    """Reads with a wrong digest."""
    gone: int
    """Reads of records that other processes had removed."""
    damaged: int
    """Damaged places and files found while the index was built."""
    evicted: int
    expired: int
    flushed: int
    skipped: dict[str, int]
    """Records not written, by reason."""
