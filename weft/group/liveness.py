"""Heartbeat times of the ranks of a group. Pure."""

from __future__ import annotations

from collections.abc import Iterable

SILENT, COLLECTIVE, GRACE = 0.6, 0.8, 0.15
"""Shares of the rank timeout: for silence of a rank; for a collective or the outcome of a step; for the cause
of a failed collective to show. So a lost rank is noticed and named within the timeout."""


class Liveness:
    """Time of the last heartbeat of each rank."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard: dict[int, float] = {}
        self._loading: dict[int, None] = {}
        self._looked = -1.0

    def expect(self, ranks: Iterable[int], now: float, loading: Iterable[int] = ()) -> None:
        """Expect heartbeats of ``ranks`` from ``now`` on, and of ``loading`` after a first heartbeat.

        Replaces all earlier expectations.
        """
        self._heard, self._loading = dict.fromkeys(ranks, now), dict.fromkeys(loading)

    def heartbeat(self, rank: int, now: float, new: bool = False) -> None:
        """Record a heartbeat of ``rank``. Ignored unless expected.

        ``new``: the rank has not been in any epoch. Only such a heartbeat counts for a ``loading`` rank.
        """
        if rank in self._heard or (new and rank in self._loading):
            self._heard[rank] = now

    def forget(self, rank: int) -> None:
        """Drop the rank's replaced process. The next process is expected only after a first heartbeat."""
        self._heard.pop(rank, None)
        self._loading[rank] = None

    def silent(self, now: float) -> int | None:
        """Return a rank without a heartbeat for longer than the patience; None if there is no such rank.

        Call often. After a long gap between calls all ranks get the full time again: the caller stood still.
        """
        late, self._looked = now - self._looked > self._patience / 2, now
        if late:
            self._heard = dict.fromkeys(self._heard, now)
        return next((rank for rank, at in self._heard.items() if now - at > self._patience), None)
