"""Index of the prefixes cached by an instance: reported by the engine, mirrored by API servers.

    front ── WatchPrefixes ──► engine          once it is up, and again after a gap
          ◄─ PrefixIndex(number, whole) ─      all cached prefixes
          ◄─ PrefixIndex(number + 1) ─         changes, with each heartbeat after a change

Pure. An API server learns of prompts sent by other API servers, and of evictions, within a heartbeat.
"""

from __future__ import annotations

from typing import Protocol

from weft.kv.prefix_log import PrefixLog
from weft.types.messages import PREFIX_KEY, PrefixIndex

MOST_KEYS = 1 << 20
"""Maximum number of keys mirrored per instance. A larger index counts as unknown."""


class FollowsPrefixes(Protocol):
    """An engine with a prefix cache."""

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """Return the log of the prefix cache and the positions per key; see ``Scheduler.follow_prefixes``."""


class PrefixReports:
    """The engine's side: one object per engine process."""

    def __init__(self, engine: FollowsPrefixes) -> None:
        self._engine = engine
        self._log: PrefixLog | None = None
        """Log of changes, from the first request on; None before."""
        self._positions = 0
        self.number = 0
        """Number of the latest message."""
        self._fronts: dict[bytes, None] = {}

    def watch(self, front: bytes) -> list[tuple[bytes, PrefixIndex]]:
        """Return the whole index for ``front``, and the pending changes for all other watching API servers.

        So all API servers are at the same message number.

        ``front`` watches from now on. Return [] if the engine shares no prefixes.
        """
        if self._log is None:
            followed = self._engine.follow_prefixes()
            if followed is None:
                return []
            self._log, self._positions = followed
        self.forget(front)
        # Flush pending changes first, so all API servers continue from the same message number.
        told = self.changes()
        keys = b"".join(self._log.keys)
        whole = PrefixIndex(number=self.number, whole=True, positions=self._positions, added=keys)
        self._fronts[front] = None
        return [*told, (front, whole)]

    def changes(self) -> list[tuple[bytes, PrefixIndex]]:
        """Return the changes since the last call, addressed to every watching API server; often [].

        Uses up the log.
        """
        if self._log is None:
            return []
        added, removed = self._log.take()
        if not added and not removed:
            return []
        self.number += 1
        told = PrefixIndex(number=self.number, positions=self._positions, added=added, removed=removed)
        return [(front, told) for front in self._fronts]

    def forget(self, front: bytes) -> None:
        """Stop the reports to ``front``. Idempotent."""
        self._fronts.pop(front, None)


class PrefixView:
    """The API server's side: the reported prefixes of one process. A new process gets a new view."""

    def __init__(self) -> None:
        self.positions = 0
        """Prompt positions per key. 0 while nothing is known: before the first message, and from a gap until
        the next whole index."""
        self.removed: tuple[bytes, ...] = ()
        """Keys removed by the latest message."""
        self.number = 0
        """Number of the latest message."""
        self._keys: set[bytes] = set()
        self._too_many = False

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def known(self) -> bool:
        """True if the cached prefixes are known."""
        return self.positions > 0

    def take(self, message: PrefixIndex) -> bool:
        """Apply ``message``. Return False after a missed message: nothing is known until the next whole
        index.

        The API server must then request the whole index. A view with more than ``MOST_KEYS`` keys stays
        unknown, and ignores all further messages.
        """
        if self._too_many:
            return True
        if not message.whole and (not self.known or message.number != self.number + 1):
            self._lose()
            return False
        if message.whole:
            self._keys.clear()
        self.removed = _split(message.removed)
        self._keys.difference_update(self.removed)
        self._keys.update(_split(message.added))
        self.number = message.number
        self.positions = message.positions
        if len(self._keys) > MOST_KEYS:
            self._too_many = True
            self._lose()
        return True

    def _lose(self) -> None:
        self.positions = 0
        self._keys.clear()
        self.removed = ()


def _split(keys: bytes) -> tuple[bytes, ...]:
    return tuple(keys[at : at + PREFIX_KEY] for at in range(0, len(keys), PREFIX_KEY))
