"""Blocks on hold: a transfer outside the group may read or write them, so nobody is given them."""

from __future__ import annotations

from collections.abc import Iterable

from weft.kv.caches import Caches


class Holds:
    """The holds of one scheduler on blocks of ``caches``.

    Each has a deadline, which gives nothing back: until then it excuses that others lack blocks.
    """

    def __init__(self, caches: Caches) -> None:
        self._kinds = caches.kinds
        self._until: dict[tuple[int, int], float] = {}
        """(kind, block) on hold -> its latest deadline."""

    def hold(self, kind: int, block: int, until: float) -> None:
        """One more hold on a block with references. Raises EngineDead for any other."""
        self._kinds[kind].pool.hold(block)
        self._until[kind, block] = max(until, self._until.get((kind, block), until))

    def unhold(self, kind: int, block: int) -> None:
        """The other side of one ``hold``. Raises EngineDead when there is none."""
        pool = self._kinds[kind].pool
        pool.unhold(block)
        if not pool.on_hold(block):
            del self._until[kind, block]

    def unhold_all(self, blocks: Iterable[tuple[int, int]]) -> None:
        """``unhold`` of each (kind, block)."""
        for kind, block in blocks:
            self.unhold(kind, block)

    def excuse(self, now: float) -> bool:
        """Whether a block is on hold whose deadline has not passed."""
        return now < max(self._until.values(), default=now)
