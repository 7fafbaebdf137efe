"""Retain cached blocks of a session between two turns, while a client runs a tool or a person reads.

Retained blocks are evicted after all others, but are still evictable. A later turn of a session replaces the
earlier turn; blocks only of the earlier turn are the next to be evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from weft.kv.caches import Caches

SHARE = 0.5
"""Maximum share of the smallest pool for retained blocks, to leave space for other prefixes."""


class _Retained(NamedTuple):
    names: list[Sequence[bytes]]
    """The result of ``Caches.retain``."""
    blocks: int
    until: float


class Retention:
    """The retained blocks of the last sequence of each session.

    Call ``expire`` before ``ended``: ``expire`` sets ``now``, from which retention counts.
    """

    def __init__(self, caches: Caches, block_size: int, seconds: float) -> None:
        """``seconds``: how long a session may pause; 0 disables retention."""
        self.now = 0.0
        self._caches = caches
        self._block = block_size
        self._seconds = seconds
        self._most = int(SHARE * caches.prefix_positions()) // block_size
        self._sessions: OrderedDict[str, _Retained] = OrderedDict()
        """Sessions in the order of expiry."""
        self.blocks = 0
        """Number of retained base blocks over all sessions; shared blocks count once per session."""

    def __len__(self) -> int:
        return len(self._sessions)

    def ended(self, session: str, hashes: list[bytes], computed: int) -> None:
        """Retain the cached blocks of an ended sequence of ``session``, in place of the session's earlier
        blocks.

        ``hashes``: of the full blocks. ``computed``: number of cached positions. Releases the oldest sessions
        while more than ``SHARE`` of the pool is retained. Does nothing without a session name or with
        retention disabled.
        """
        if not self._seconds or not session:
            return
        retained = hashes[: min(computed // self._block, self._most)]
        before = self._sessions.pop(session, None)
        names = self._caches.retain(retained)  # first: blocks of both turns stay retained
        if before is not None:
            self._drop(before)
        if not retained:
            return
        self._sessions[session] = _Retained(names, len(retained), self.now + self._seconds)
        self.blocks += len(retained)
        while self.blocks > self._most:
            self._drop(self._sessions.popitem(last=False)[1])

    def expire(self, now: float) -> None:
        """Release sessions after too long a pause, and set ``now``."""
        self.now = now
        while self._sessions and next(iter(self._sessions.values())).until <= now:
            self._drop(self._sessions.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all sessions, after the caches were reset."""
        self._sessions.clear()
        self.blocks = 0

    def _drop(self, retained: _Retained) -> None:
        self._caches.end_retention(retained.names)
        self.blocks -= retained.blocks
