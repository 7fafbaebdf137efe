"""Keeps what sessions have cached for a while: between two turns a client runs a tool, or a person reads.

Blocks that are kept are evicted after all others, not never: whoever needs blocks gets them. A later state of
a session takes the place of an earlier one, whose own blocks are the next to go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from weft.kv.caches import Caches

SHARE = 0.5
"""Of the smallest pool, at most: so that others' prefixes are cached, too."""


class _Kept(NamedTuple):
    names: list[Sequence[bytes]]
    """See ``Caches.keep``."""
    blocks: int
    until: float


class Retention:
    """By session, what of its last sequence is kept. ``now``: set before anything ends."""

    def __init__(self, caches: Caches, block_size: int, seconds: float) -> None:
        """``seconds`` that a session may pause; 0: nothing is kept."""
        self.now = 0.0
        self._caches = caches
        self._block = block_size
        self._seconds = seconds
        self._most = int(SHARE * caches.prefix_positions()) // block_size
        self._sessions: OrderedDict[str, _Kept] = OrderedDict()
        """The one that ends first comes first."""
        self.blocks = 0
        """Of all, in base blocks; those that sessions share are counted for each."""

    def __len__(self) -> int:
        return len(self._sessions)

    def ended(self, session: str, hashes: list[bytes], computed: int) -> None:
        """A sequence of ``session`` has ended, of which ``computed`` positions are cached; ``hashes``: of its
        full blocks."""
        if not self._seconds or not session:
            return
        kept = hashes[: min(computed // self._block, self._most)]
        before = self._sessions.pop(session, None)
        names = self._caches.keep(kept)  # first: what both have stays where it is
        if before is not None:
            self._drop(before)
        if not kept:
            return
        self._sessions[session] = _Kept(names, len(kept), self.now + self._seconds)
        self.blocks += len(kept)
        while self.blocks > self._most:
            self._drop(self._sessions.popitem(last=False)[1])

    def expire(self, now: float) -> None:
        """Lets go of sessions that have paused for too long."""
        self.now = now
        while self._sessions and next(iter(self._sessions.values())).until <= now:
            self._drop(self._sessions.popitem(last=False)[1])

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._sessions.clear()
        self.blocks = 0

    def _drop(self, kept: _Kept) -> None:
        self._caches.unkeep(kept.names)
        self.blocks -= kept.blocks
