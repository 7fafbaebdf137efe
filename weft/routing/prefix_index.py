"""Which prefixes an instance has cached: told by its head, known by fronts.

    front ── WatchPrefixes ──► head            once it is up, and again after a gap
          ◄─ PrefixIndex(number, whole) ─      all that is cached
          ◄─ PrefixIndex(number + 1) ─         what changed, with each heartbeat in which something did

Pure. A front learns of what other fronts sent there, and of what was evicted, within a heartbeat.
"""

from __future__ import annotations

from typing import Protocol

from weft.kv.prefix_log import PrefixLog
from weft.types.messages import PREFIX_KEY, PrefixIndex

MOST_KEYS = 1 << 20
"""Keys that a front keeps of one instance. One that has more is known as if it told nothing."""


class FollowsPrefixes(Protocol):
    """An engine with a prefix cache."""

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None:
        """See ``Scheduler.follow_prefixes``."""


class PrefixReports:
    """The head's side: one for each head process."""

    def __init__(self, engine: FollowsPrefixes) -> None:
        self._engine = engine
        self._log: PrefixLog | None = None
        """From the first front that asks."""
        self._positions = 0
        self.number = 0
        """Of the latest message."""
        self._fronts: dict[bytes, None] = {}

    def watch(self, front: bytes) -> list[tuple[bytes, PrefixIndex]]:
        """``front`` asks: it gets all, and the others what changed, so that all are at the same number.

        Nothing where the engine shares no prefixes.
        """
        if self._log is None:
            followed = self._engine.follow_prefixes()
            if followed is None:
                return []
            self._log, self._positions = followed
        self.forget(front)
        told = self.changes()
        keys = b"".join(self._log.keys)
        whole = PrefixIndex(number=self.number, whole=True, positions=self._positions, added=keys)
        self._fronts[front] = None
        return [*told, (front, whole)]

    def changes(self) -> list[tuple[bytes, PrefixIndex]]:
        """What changed since the last call, to all fronts that asked."""
        if self._log is None:
            return []
        added, removed = self._log.take()
        if not added and not removed:
            return []
        self.number += 1
        told = PrefixIndex(number=self.number, positions=self._positions, added=added, removed=removed)
        return [(front, told) for front in self._fronts]

    def forget(self, front: bytes) -> None:
        """The front is gone. Idempotent."""
        self._fronts.pop(front, None)


class PrefixView:
    """The front's side: what one process of an instance has told. Of another process there is another
    view.
    """

    def __init__(self) -> None:
        self.positions = 0
        """Of a prefix, between two keys; 0 while nothing is known: before the first message, and from a gap
        until all was told again."""
        self.removed: tuple[bytes, ...] = ()
        """By the latest message."""
        self.number = 0
        """Of the latest message."""
        self._keys: set[bytes] = set()
        self._too_many = False

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def known(self) -> bool:
        """Whether it says what is cached."""
        return self.positions > 0

    def take(self, message: PrefixIndex) -> bool:
        """Takes in ``message``. False when one before it was missed: then nothing is known until all is told
        again, for which the front has to ask.
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
