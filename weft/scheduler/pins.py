"""Pins of blocks: a transfer outside the group may read or write a pinned block, so the block is not
reused."""

from __future__ import annotations

from collections.abc import Iterable

from weft.kv.caches import Caches


class Pins:
    """The pins of one scheduler on blocks of ``caches``.

    A pin has a deadline. The deadline releases nothing: until the deadline the pin excuses missing blocks.
    """

    def __init__(self, caches: Caches) -> None:
        self._kinds = caches.kinds
        self._until: dict[tuple[int, int], float] = {}
        """(KV cache group, pinned block) -> latest deadline."""

    def pin(self, kind: int, block: int, until: float) -> None:
        """Add a pin to a block in use. Raises EngineDead for any other block."""
        self._kinds[kind].pool.pin(block)
        self._until[kind, block] = max(until, self._until.get((kind, block), until))

    def unpin(self, kind: int, block: int) -> None:
        """Release one pin. Raises EngineDead if the block has none."""
        pool = self._kinds[kind].pool
        pool.unpin(block)
        if not pool.is_pinned(block):
            del self._until[kind, block]

    def unpin_all(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Release one pin of each (KV cache group, block)."""
        for kind, block in blocks:
            self.unpin(kind, block)

    def excuse(self, now: float) -> bool:
        """Return True if the deadline of a pinned block has not passed."""
        return now < max(self._until.values(), default=now)
