"""Expiry of directory records, by the reader's clock alone, and the choice between two processes of one name.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from weft.control.directory.record import LEASE_S, EngineRecord


class _Seen(NamedTuple):
    record: EngineRecord
    at: float
    """Time at which the reader first saw the beat of ``record``."""


class Leases:
    """The records of a directory that are not expired.

    A record expires when its beat has not changed for ``seconds`` of the reader's clock. Clocks of different
    hosts are never compared.

    A host that is cut off may publish a name while another process already has the name. Then the greater
    incarnation counts until its lease ends, whichever record was read last. So all API servers use the same
    process.
    """

    def __init__(self, seconds: float = LEASE_S) -> None:
        self._seconds = seconds
        self._seen: dict[str, _Seen] = {}

    def present(self, records: Mapping[str, EngineRecord], now: float) -> dict[str, EngineRecord]:
        """Return the records that are not expired at ``now``, in order of the name. ``records``: all records
        of the directory. Call often: a record counts from the first call that shows the record's beat."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in records}
        fresh = {}
        for name, record in sorted(records.items()):
            seen = self._seen.get(name)
            if seen is None or self._replaces(record, seen, now):
                seen = _Seen(record, now)
            elif record.incarnation == seen.record.incarnation:
                seen = seen._replace(record=record)
            self._seen[name] = seen
            if now - seen.at < self._seconds:
                fresh[name] = seen.record
        return fresh

    def _replaces(self, record: EngineRecord, seen: _Seen, now: float) -> bool:
        """Return True if ``record`` is a renewal, a later process, or comes after an expired lease."""
        if record.incarnation == seen.record.incarnation:
            return record.beat != seen.record.beat
        return record.incarnation > seen.record.incarnation or now - seen.at >= self._seconds

    def stall(self, seconds: float) -> None:
        """Extend all leases by ``seconds``, in which the reader could not read the directory."""
        self._seen = {name: seen._replace(at=seen.at + seconds) for name, seen in self._seen.items()}
