"""Expiry of directory records, by the reader's clock alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from weft.control.directory.record import LEASE_S, EngineRecord


class Leases:
    """The records of a directory that are not expired.

    A record expires when its beat has not changed for ``seconds`` of the reader's clock. Clocks of different
    hosts are never compared.
    """

    def __init__(self, seconds: float = LEASE_S) -> None:
        self._seconds = seconds
        self._seen: dict[str, tuple[int, int, float]] = {}
        """Name -> incarnation, beat, and time at which the reader first saw the beat."""

    def present(self, records: Mapping[str, EngineRecord], now: float) -> dict[str, EngineRecord]:
        """Return the records that are not expired at ``now``, in order of the name. ``records``: all records
        of the directory. Call often: a record counts from the first call that shows the record's beat."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in records}
        fresh = {}
        for name, record in sorted(records.items()):
            seen = self._seen.get(name)
            if seen is None or seen[:2] != (record.incarnation, record.beat):
                seen = self._seen[name] = (record.incarnation, record.beat, now)
            if now - seen[2] < self._seconds:
                fresh[name] = record
        return fresh

    def stall(self, seconds: float) -> None:
        """Extend all leases by ``seconds``, in which the reader could not read the directory."""
        self._seen = {name: (one, beat, at + seconds) for name, (one, beat, at) in self._seen.items()}
