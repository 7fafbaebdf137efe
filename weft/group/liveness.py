"""Which ranks have sent a heartbeat lately. Pure."""

from __future__ import annotations

from collections.abc import Iterable

SILENT, COLLECTIVE, GRACE = 0.6, 0.8, 0.15
"""Shares of the rank timeout: how long a rank may be silent; a collective, or a step's outcome, may be waited
for; and who was at fault may take to show. So a lost rank is noticed, and named, within the timeout."""


class Liveness:
    """When each rank was last heard of."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard: dict[int, float] = {}
        self._loading: dict[int, None] = {}
        self._looked = -1.0

    def expect(self, ranks: Iterable[int], now: float, loading: Iterable[int] = ()) -> None:
        """From now on only these ranks must be heard of, and ``loading`` from their first heartbeat on."""
        self._heard, self._loading = dict.fromkeys(ranks, now), dict.fromkeys(loading)

    def heard(self, rank: int, now: float, new: bool = False) -> None:
        """``rank`` runs; nothing to one that is not expected. ``new``: it has not been in any epoch."""
        if rank in self._heard or (new and rank in self._loading):
            self._heard[rank] = now

    def forget(self, rank: int) -> None:
        """Forgets the rank, whose process is replaced: expects the next one from its first heartbeat on."""
        self._heard.pop(rank, None)
        self._loading[rank] = None

    def silent(self, now: float) -> int | None:
        """A rank that was silent for too long; call it often.

        After a late look nobody is silent: it was this process that stood still.
        """
        late, self._looked = now - self._looked > self._patience / 2, now
        if late:
            self._heard = dict.fromkeys(self._heard, now)
        return next((rank for rank, at in self._heard.items() if now - at > self._patience), None)
